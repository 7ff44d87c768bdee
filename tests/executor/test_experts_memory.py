"""What experts take of a rank beside weights: no less than what the code allocates, and what is published of MORI."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from rocm_serve.errors import UserError
from rocm_serve.executor import experts_memory, step_memory
from rocm_serve.executor.experts_memory import LayerExchange, layer_exchanges, staging_bytes, workspace_bytes
from rocm_serve.models.qwen3_5.spec import ConfigFormats, ModelFacts, one_of_each, parse_config, stage_params
from rocm_serve.ops.fp8 import FN
from rocm_serve.ops.moe_experts.reference import moe_experts as reference
from rocm_serve.parallel.comm import ThreadComm, run_ranks
from rocm_serve.parallel.exchange.contract import ExchangeSpec
from rocm_serve.parallel.exchange.make import make_exchange
from rocm_serve.parallel.expert_map import DRAFT_LAYER, ExpertMap, ExpertPlan
from rocm_serve.parallel.mesh import Mesh
from tests.checkpoint import published
from tests.executor.wishes import facts, resolved

GIB = 1 << 30


class Live(TorchFunctionMode):
    """The most bytes of tensors that were alive at one time and had not been before."""

    def __init__(self, *known: torch.Tensor) -> None:
        super().__init__()
        self.peak = 0
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}
        for tensor in known:
            self._add(tensor, 0)

    def _add(self, tensor: torch.Tensor, nbytes: int) -> None:
        ref = StorageWeakRef(tensor.untyped_storage())
        known = self._seen.get(ref.cdata)
        if known is None or known[0].expired():
            self._seen[ref.cdata] = ref, nbytes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor, tensor.untyped_storage().nbytes())
        self._seen = {key: held for key, held in self._seen.items() if not held[0].expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._seen.values()))
        return out


class AnyGrid:
    """A kernel that is launched and does nothing."""

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **kwargs: None


@pytest.mark.parametrize(
    ("rows", "top_k", "slots", "width", "fp8"),
    [
        (576, 10, 512, 256, True),  # Qwen3.8 at TP8
        (576, 10, 64, 2048, True),  # with EP8, local
        (8256, 10, 64, 2048, True),  # the panel is full
        (65536, 10, 64, 2048, True),  # the panel is a tile wide, and MORI's largest buffer
        (576, 10, 64, 2048, False),
        (1, 10, 64, 2048, True),
        (16, 10, 512, 256, True),
        (256, 10, 512, 256, True),
        (256, 10, 512, 256, False),
    ],
)
def test_the_triton_provider_stays_within_the_workspace(
    monkeypatch: pytest.MonkeyPatch, rows: int, top_k: int, slots: int, width: int, fp8: bool
) -> None:
    """Counted on tensors without memory, at true sizes, with kernels that do nothing."""
    pytest.importorskip("triton")
    op, few, grouped, order = (
        importlib.import_module(f"rocm_serve.ops.moe_experts.triton{part}")
        for part in ("", "_few", "_grouped", "_order")
    )
    common = importlib.import_module("rocm_serve.ops.triton_common.triton")
    assert (grouped._RETURNED_BYTES, grouped.BN) == (experts_memory.RETURNED_BYTES, experts_memory.PANEL_COLUMNS)
    for module in (op, few, grouped, order, common):
        for name in vars(module).copy():
            if name == "arch":
                monkeypatch.setattr(module, "arch", lambda: "gfx942")
            if name.endswith("_kernel"):
                monkeypatch.setattr(module, name, AnyGrid())
    hidden = 8192
    with torch.device("meta"):
        x = torch.empty(rows, hidden, dtype=torch.bfloat16)
        ids, weights = torch.empty(rows, top_k, dtype=torch.int32), torch.empty(rows, top_k)
        dtype = FN if fp8 else torch.bfloat16
        w13, w2 = torch.empty(slots, 2 * width, hidden, dtype=dtype), torch.empty(slots, hidden, width, dtype=dtype)
        scales = [torch.empty(slots, *(n // 128 for n in w.shape[1:])) if fp8 else None for w in (w13, w2)]
    with Live(x, ids, weights, w13, w2) as live:
        op.moe_experts(x, ids, weights, rows, w13, w2, *scales, activation="fp8_1x128" if fp8 else "bf16")
    bound = workspace_bytes(rows, top_k, hidden, 2 * width, slots, kernels=True)
    assert bound / 4 < live.peak <= bound


def test_the_reference_stays_within_the_workspace() -> None:
    g = torch.Generator().manual_seed(3)
    rows, top_k, slots, width, hidden = 64, 4, 8, 64, 256
    x, weights = torch.randn(rows, hidden, generator=g), torch.rand(rows, top_k, generator=g)
    ids = torch.stack([torch.randperm(slots, generator=g)[:top_k] for _ in range(rows)])
    w13, w2 = torch.randn(slots, 2 * width, hidden, generator=g), torch.randn(slots, hidden, width, generator=g)
    with Live(x, ids, weights, w13, w2) as live:
        reference(x, ids, weights, rows, w13, w2, activation="bf16")
    bound = workspace_bytes(rows, top_k, hidden, 2 * width, slots, kernels=False)
    assert bound / 4 < live.peak <= bound


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("name", ["local", "torch", "all_gather"])
def test_rows_on_their_way_stay_within_the_staging(name: str, fp8: bool) -> None:
    """The worst of cases: every row goes to every rank."""
    model, ranks, rows = facts(), 4, 200
    hidden, top_k = model.hidden_size, model.top_k
    assert top_k < ranks <= model.num_experts
    spec = ExchangeSpec(name, ranks, 2, top_k, hidden, rows, torch.bfloat16, fp8_rows=fp8)
    x = torch.randn(rows, hidden, generator=torch.Generator().manual_seed(1)).bfloat16()

    def body(comm: ThreadComm) -> tuple[int, int]:
        exchange = make_exchange(spec, comm, row_multiple=1)
        with Live(x) as live:
            own, n = exchange.scatter(x, rows) if exchange.scattered else (x, rows)
            scales = torch.ones(own.shape[0], hidden // 128) if fp8 else None
            ids = torch.arange(top_k).repeat(own.shape[0], 1) * 2 + 2 * (torch.arange(own.shape[0])[:, None] % 2)
            weights = torch.ones(own.shape[0], top_k)
            sent = exchange.dispatch(own.to(FN) if fp8 else own, scales, ids, weights, n)
            returned = torch.zeros(sent.rows.shape, dtype=torch.bfloat16)
            out = exchange.combine(returned, sent)
            if exchange.scattered:
                exchange.gather(out, rows, rows)
        return live.peak, returned.nbytes

    for peak, returned in run_ranks(ranks, body):
        bound = staging_bytes(name, model, rows, ranks, itemsize=2, fp8_rows=fp8)
        inputs = rows * (hidden + 100)  # of this test: ids, weights, scales, quantised rows
        assert peak <= bound + returned + inputs
        assert name == "local" or peak > bound / 4


def test_rows_that_experts_are_called_with() -> None:
    def rows(name: Any, capacity: int = 0, *, n: int = 100, multiple: int = 1) -> int:
        return experts_memory.expert_rows(name, capacity, n, 8, multiple)

    assert (rows("local"), rows("torch"), rows("all_gather")) == (100, 104, 104)
    assert rows("all_gather", multiple=32) == 8 * 32
    assert rows("mori", 256) == 2048 and rows("mori", 256, n=2000) == 2048


def qwen() -> ModelFacts:
    return parse_config(published.config(), published.generation_config())


EIGHT = ExpertPlan(8, shared_whole=True)


def heap(capacity: int, plan: ExpertPlan = EIGHT, **changes: Any) -> int:
    wish = resolved(
        tp=8, pp=2, ep=8, nnodes=2, device="rocm", dtype="bfloat16", expert_exchange="mori", expert_capacity=capacity
    )
    wish = type(wish)(**{name: getattr(wish, name) for name in wish.__struct_fields__} | changes)
    model = qwen()
    return experts_memory.mori_heap_bytes(
        model, layer_exchanges(model, plan, wish, mtp=bool(changes)), wish, compute_units=304
    )


@pytest.mark.parametrize(
    ("capacity", "gib"), [(256, 0.07), (1024, 0.27), (2048, 0.55), (4096, 1.09), (8192, 2.19), (16384, 4.38)]
)
def test_the_heap_of_mori_is_what_its_allocator_was_read_to_take(capacity: int, gib: float) -> None:
    """The published row is without what we add for rounding; all 92 layers share one op."""
    rounding = (16 << 20) + (1 << 20)
    assert (heap(capacity) - rounding) / GIB == pytest.approx(gib, rel=0.012, abs=0.006)


def test_layers_that_ask_for_other_ops_each_have_their_own() -> None:
    one = heap(1024)
    some = {layer: ExpertMap((*range(512), *range(64)), 8) for layer in (3, 7)}
    assert heap(1024, ExpertPlan(8, shared_whole=True, maps=some)) > 1.9 * one
    draft = {"speculative_expert_exchange": "mori", "speculative_expert_capacity": 2048}
    plan = ExpertPlan(8, shared_whole=True, draft_shared_whole=True)
    assert heap(1024, plan, **draft) == pytest.approx(one + heap(2048), rel=0.05)
    assert heap(1024, expert_exchange="local", expert_capacity=0) == 0


def test_what_a_layer_asks_of_its_exchange() -> None:
    model, plan = qwen(), ExpertPlan(8, shared_whole=True, maps={5: ExpertMap((*range(512), *range(8)), 8)})
    wish = resolved(
        tp=8,
        ep=8,
        expert_exchange="torch",
        expert_capacity=72,
        speculative_expert_exchange="local",
        fp8_activation="fp8_1x128",
    )
    found = layer_exchanges(model, plan, wish, mtp=True)
    assert len(found) == 93
    assert found[0] == found[91] == LayerExchange("torch", 72, 64, True)
    assert found[5] == LayerExchange("torch", 72, 65, True)
    assert found[DRAFT_LAYER] == LayerExchange("local", 0, 64, False)
    bf16 = layer_exchanges(model, plan, resolved(tp=8, ep=8, expert_exchange="torch"))
    assert not bf16[0].fp8_rows, "rows are multiplied as bf16"


def test_a_heap_that_is_too_small_is_refused_before_anything_starts() -> None:
    model, plan = qwen(), ExpertPlan(8, shared_whole=True)

    def check(capacity: int, exchange: str = "mori", **environ: str) -> None:
        wish = resolved(tp=8, ep=8, device="rocm", dtype="bfloat16", expert_exchange=exchange, expert_capacity=capacity)
        experts_memory.check_mori(model, plan, wish, compute_units=304, environ=environ)

    check(8192)
    check(16384, MORI_SHMEM_HEAP_SIZE="5G")
    check(16384, MORI_SHMEM_MODE="vmm_heap")
    check(16384, "torch", MORI_SHMEM_HEAP_SIZE="1G", MORI_SHMEM_MODE="static")
    with pytest.raises(UserError, match="MORI_SHMEM_MODE=static; legal: static_heap, vmm_heap, or unset"):
        check(8192, MORI_SHMEM_MODE="static")
    with pytest.raises(UserError, match=r"needs 4\.4\d GiB .* is not set and MORI's own is 4G; set .*=5G"):
        check(16384)
    assert experts_memory.reserved_heap_bytes(heap(16384)) == 5 * GIB
    assert (experts_memory.reserved_heap_bytes(heap(256)), experts_memory.reserved_heap_bytes(0)) == (4 * GIB, 0)


@pytest.mark.parametrize("name", ["torch", "all_gather", "mori"])
def test_a_step_holds_what_experts_take_on_top(name: str) -> None:
    model = one_of_each(qwen())

    def step(exchange: str, ep: int, capacity: int, **changes: Any) -> int:
        wish = resolved(
            tp=8,
            ep=ep,
            device="rocm",
            dtype="bfloat16",
            fp8_activation="fp8_1x128",
            expert_exchange=exchange,
            expert_capacity=capacity,
            **changes,
        )
        coord = Mesh(8, 1, ep).coord(0)
        plan = ExpertPlan(ep, shared_whole=exchange != "local")
        params = stage_params(model, coord, formats=ConfigFormats(model), mtp=False, experts=plan)
        return step_memory.step_bytes(params, model, coord, wish)

    local, sent = step("local", 8, 0), step(name, 8, 256)
    assert sent > local
    if name == "mori":
        assert step(name, 8, 1024) > sent, "its experts are called with whole buffers"
    assert step("local", 8, 0, op={"moe_experts": "reference"}) >= local
