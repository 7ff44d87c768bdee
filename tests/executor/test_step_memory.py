"""What a step is planned to hold, against the tensors that its layers really make: on meta, with nothing launched."""

from __future__ import annotations

import importlib.util
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rocm_serve.cache.allocate import KV_DTYPES, allocate_stage_cache
from rocm_serve.cache.layout import CACHE_ITEMSIZE
from rocm_serve.config.graphs import batch_sizes, prompt_sizes, verified_sizes
from rocm_serve.config.schema import Resolved
from rocm_serve.executor import memory, step_memory
from rocm_serve.executor.decode import DecodeSteps
from rocm_serve.executor.draft_steps import DraftSteps
from rocm_serve.executor.graphs import DeviceGraphs
from rocm_serve.executor.inputs import RequestTable
from rocm_serve.executor.prompt_steps import PromptSteps
from rocm_serve.models.qwen3_5.spec import ConfigFormats, ModelFacts, stage_params
from rocm_serve.models.registry import build_model
from rocm_serve.ops.batch import ForwardBatch, Sequences, StageCache
from rocm_serve.ops.bind import BoundOps, bind_ops
from rocm_serve.ops.fp8 import FN
from rocm_serve.parallel.comm import SoloComm
from rocm_serve.parallel.mesh import Mesh
from rocm_serve.tuning.shapes import facts_of
from tests.executor.wishes import resolved

META, BF16 = torch.device("meta"), torch.bfloat16
SOLO = Mesh(1, 1).coord(0)
triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed here")


class Held(TorchDispatchMode):
    """Counts the bytes of tensors that operators have made and that are still there; `most`: at one time."""

    def __init__(self, given: list[torch.Tensor]) -> None:
        super().__init__()
        self.now = self.most = 0
        self._seen = {tensor.untyped_storage()._cdata for tensor in given}

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return made

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._seen:
            self._seen.add(key)
            self.now += storage.nbytes()
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._gone, key, storage.nbytes())

    def _gone(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size


def one_period(name: str) -> ModelFacts:
    """Return a measured model with four layers: three delta rules and attention."""
    facts = facts_of(name)
    return replace(facts, num_layers=4, layer_types=facts.layer_types[:4])


def wish(facts: ModelFacts, rows: int, running: int, longest: int) -> Resolved:
    return resolved(
        device="cuda",
        dtype="bfloat16",
        kv_cache_dtype="bfloat16",
        fp8_activation="fp8_1x128",
        chunked_prefill_size=rows,
        max_running_requests=running,
        max_model_len=longest,
        vocab_size=facts.vocab_size,
    )


def batch_of(cache: StageCache, rows: tuple[int, ...], decodes: int, context: int) -> ForwardBatch:
    """Lay out requests that decode and prompts of so many rows; nobody reads what the device holds of them."""
    starts = [0]
    for n in (*(1,) * decodes, *rows):
        starts.append(starts[-1] + n)
    many = decodes + len(rows)
    i32 = [torch.empty(n, dtype=torch.int32, device=META) for n in (many + 1, many, many)]
    table = torch.empty(many, context // cache.page_size + 1, dtype=torch.int32, device=META)
    sequences = Sequences(tuple(starts), (context,) * many, (1,) * many, decodes, *i32, table)
    tokens = (torch.empty(starts[-1], dtype=torch.int64, device=META) for _ in range(3))
    return ForwardBatch(*tokens, sequences, cache)


def held_by_layers(
    facts: ModelFacts, ops: BoundOps, resolved: Resolved, rows: tuple[int, ...], decodes: int, context: int
) -> int:
    launches = importlib.import_module("rocm_serve.ops.triton_launches.triton")
    params = stage_params(facts, SOLO, formats=ConfigFormats(facts), mtp=False)
    with launches.left_out("sm_90"), torch.inference_mode():
        model = build_model(
            facts, SOLO, params, SoloComm(), ops, device=META, dtype=BF16, mtp=False, fp8=FN, experts=None
        )
        model.prepare()
        cache = allocate_stage_cache(
            memory.layout_of(facts, SOLO, resolved),
            num_pages=1,
            num_slots=1,
            kv_dtype=KV_DTYPES["bfloat16"],
            conv_dtype=BF16,
            device=META,
        )
        batch = batch_of(cache, rows, decodes, context)
        kept = [cache.k_pages, cache.v_pages, cache.conv, cache.ssm]
        given = [*model.state_dict().values(), *(x for one in kept for x in one.values())]
        with Held(given) as held:
            model.forward(batch, None)
    return held.most


@triton
@pytest.mark.parametrize(
    ("name", "rows", "decodes", "context", "measured"),
    [
        ("q38tp8", (512,), 0, 0, 119),  # by torch on an H200: the same MiB
        ("q38tp8", (2048,), 0, 0, 314),
        ("q38tp8", (8192,), 0, 0, 836),
        ("q38tp8", (16,), 0, 16384, None),
        ("q35tp1", (2048,), 0, 0, None),
        ("q35tp1", (32,) * 64, 64, 300, None),
        ("q35tp1", (256,), 0, 16000, None),
        ("q35tp1", (1984,), 64, 100_000, None),
        ("q35tp1", (), 250, 5000, None),
    ],
)
def test_layers_hold_no_more_than_is_planned(
    name: str, rows: tuple[int, ...], decodes: int, context: int, measured: int | None
) -> None:
    facts = one_period(name)
    wished = wish(facts, sum(rows), decodes + len(rows), context + max(rows, default=1))
    ops = bind_ops({}, "sm_90", activation="fp8_1x128")
    found = held_by_layers(facts, ops, wished, rows, decodes, context)
    params = stage_params(facts, SOLO, formats=ConfigFormats(facts), mtp=False)
    without_head = {key: param for key, param in params.items() if key != "lm_head.weight"}
    no_head = replace(facts, vocab_size=1)
    planned = memory.work_bytes(without_head, no_head, SOLO, wished, counted=True) / step_memory.SLACK
    assert found <= planned
    if measured is not None:
        assert found / 2**20 == pytest.approx(measured, rel=0.01)
        assert planned <= 2.1 * found, "a bound, not a guess"


def test_nobody_knows_what_other_providers_hold() -> None:
    assert step_memory.counted([("linear", "torch"), ("layers.3.gdn_chunk", "triton"), ("moe_experts", "triton")])
    assert not step_memory.counted([("gdn_chunk", "triton"), ("layers.3.gdn_chunk", "reference")])
    assert not step_memory.counted([("attention_prefill", "aiter")])
    wished = wish(one_period("q35tp1"), 64, 4, 128)
    assert step_memory.counted_before_binding(wished)
    for change in ({"device": "rocm"}, {"op": {"layers.1.gdn_chunk": "reference"}}, {"device": "cpu"}):
        assert not step_memory.counted_before_binding(msgspec.structs.replace(wished, **change))
    assert step_memory.counted_before_binding(msgspec.structs.replace(wished, op={"rms_norm": "reference"}))


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("drafts", [0, 3])
def test_inputs_of_steps_of_fixed_sizes_are_planned(monkeypatch: pytest.MonkeyPatch, stage: int, drafts: int) -> None:
    """Every tensor that such steps keep, on a stage that is sent rows and on one that embeds tokens."""
    monkeypatch.setattr(memory.graphs, "PROMPTS", 16)
    facts = replace(facts_of("q38tp8"), mtp_layers=1)
    wished = msgspec.structs.replace(wish(facts, 2048, 96, 40_000), pp=2, draft_tokens=drafts)
    coord = Mesh(1, 2).coord(stage)
    hidden = None if coord.first_stage else facts.hidden_size
    cache = StageCache(wished.page_size, {}, {}, {}, {}, draft_tokens=drafts)
    shared: dict[str, Any] = {"hidden_size": hidden, "dtype": BF16, "device": torch.device("cpu"), "row_multiple": 1}
    shared["recorder"] = DeviceGraphs(wished.max_model_len)
    pages = -(-wished.max_model_len // wished.page_size)
    model: Any = None
    table = RequestTable(wished.page_size)
    sizes = batch_sizes(96)
    steps: list[object] = [
        PromptSteps(
            model,
            cache,
            decodes=memory.prompt_counts(wished),
            rows=prompt_sizes(memory.prompt_rows(wished)),
            prompts=memory.prompt_sequences(wished),
            captured=True,
            max_model_len=wished.max_model_len,
            **shared,
        )
    ]
    if drafts:
        verified = verified_sizes(96, drafts)
        more: dict[str, Any] = {"verified_sizes": verified, "captured": True, "vocab_size": facts.vocab_size}
        steps.append(DraftSteps(model, None, cache, table, None, sizes=sizes, max_pages=pages, **more, **shared))
    else:
        steps.append(DecodeSteps(model, cache, table, None, sizes=sizes, captured=sizes, max_pages=pages, **shared))
    kept = {
        x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()
        for one in steps
        for value in vars(one).values()
        for x in tree_leaves(value)
        if isinstance(x, torch.Tensor)
    }
    planned = memory.inputs_bytes(facts, coord, wished)
    assert sum(kept.values()) <= planned <= 1.5 * sum(kept.values())
    assert planned == memory.step_bytes({}, facts, coord, wished) - memory.work_bytes({}, facts, coord, wished)
    if hidden is not None:
        assert planned > (2048 + 64) * hidden * CACHE_ITEMSIZE["bfloat16"]
