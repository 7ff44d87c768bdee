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
from rocm_serve.checkpoint.synthetic_configs import Dims, model_config
from rocm_serve.config import graphs
from rocm_serve.config.graphs import batch_sizes, prompt_sizes, verified_sizes
from rocm_serve.config.schema import Resolved
from rocm_serve.executor import outside_memory, stage_memory, step_memory, step_rows, vocab_shard
from rocm_serve.executor.decode import DecodeSteps
from rocm_serve.executor.draft_steps import DraftSteps
from rocm_serve.executor.graphs import DeviceGraphs
from rocm_serve.executor.inputs import RequestTable
from rocm_serve.executor.prompt_steps import PromptSteps
from rocm_serve.executor.sample_rows import SampleRow
from rocm_serve.executor.sampler import DRAWN_ROWS, Sampler
from rocm_serve.executor.upload import Array
from rocm_serve.models.qwen3_5.spec import ConfigFormats, ModelFacts, parse_config, stage_params
from rocm_serve.models.registry import build_model
from rocm_serve.ops.batch import ForwardBatch, Sequences, StageCache
from rocm_serve.ops.bind import BoundOps, bind_ops
from rocm_serve.ops.fp8 import FN
from rocm_serve.parallel.comm import SoloComm
from rocm_serve.parallel.mesh import Mesh
from rocm_serve.tuning.shapes import SHAPES, facts_of
from rocm_serve.types import SamplingParams
from tests.executor import wishes
from tests.executor.wishes import IDS, resolved

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
            stage_memory.layout_of(facts, SOLO, resolved),
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
        ("q35tp1", (2048,), 0, 0, 139),
        ("q35tp1", (128,) * 16, 64, 1024, 167),
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
    planned = step_memory.work_bytes(without_head, no_head, SOLO, wished, counted=True) / step_memory.SLACK
    assert found <= planned
    if measured is not None:
        assert found / 2**20 == pytest.approx(measured, rel=0.01)
        assert planned <= 2.1 * found, "a bound, not a guess"


class Alike(SoloComm):
    """One of `size` ranks that all say the same."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x.expand(self.size, *x.shape).clone()


@pytest.mark.parametrize("tp", [1, 8])
@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.0, "presence_penalty": 1.0},
        {"temperature": 1.0},
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 1.0, "min_p": 0.1, "repetition_penalty": 1.2, "logprobs": 5},
        {"temperature": 1.0, "top_k": 32},
    ],
    ids=lambda fields: " ".join(fields),
)
def test_draws_hold_no_more_than_is_planned(fields: dict[str, Any], tp: int) -> None:
    """Of 96 rows, one of them greedy, which makes copies of all others: no path takes all rows at one time."""
    count, vocabulary = 96, 8192
    width = vocabulary // tp
    sampler = Sampler(Alike(tp), vocab_start=0, vocab_local=width, vocab_used=vocabulary - 20)
    rows = [SampleRow(SamplingParams(max_tokens=4, seed=i, **fields), 5, 1, (1, 2)) for i in range(count - 1)]
    rows.append(SampleRow(SamplingParams(max_tokens=4, temperature=0.0), 5, 1, (1, 2)))
    logits_RV = torch.randn(count, width, generator=torch.Generator().manual_seed(tp))
    with torch.inference_mode(), Held([]) as held:
        sampler.sample(logits_RV.clone(), rows)
    facts = replace(one_period("q38tp8"), vocab_size=vocabulary)
    drawn = step_memory.drawn_bytes(facts, count)
    planned = step_memory.head_bytes(facts, tp, wish(facts, 0, count, 128), 3 * count, drawn)
    assert count * width * 4 < held.most <= planned
    if fields.get("top_p"):
        assert planned <= 1.5 * held.most, "a bound, not a guess"
        assert step_memory.drawn_bytes(facts, 3) == drawn * 3 // 32 and drawn == step_memory.drawn_bytes(facts, 32)


def to_meta(*arrays: Array) -> list[torch.Tensor]:
    return [torch.from_numpy(array).to(META) for array in arrays]


@triton
@pytest.mark.parametrize("tp", [1, 8])
@pytest.mark.parametrize("several", [{"top_p": 0.9}, {"top_k": 20}, {"top_k": 1024, "min_p": 0.1}, {}], ids=str)
def test_draws_on_a_gpu_ask_it_for_nothing_and_hold_what_is_planned(several: dict[str, Any], tp: int) -> None:
    """By 256 rows of the real vocabulary on meta, which refuses to say anything; one row in 32 takes all of its row."""
    count, facts = 256, one_period("q35tp1")
    width = facts.vocab_size // tp
    op = importlib.import_module("rocm_serve.ops.sampling.triton").draw_token
    upload: Any = to_meta
    place = {"vocab_start": 0, "vocab_local": width, "vocab_used": facts.vocab_size - 243}
    sampler = Sampler(Alike(tp), **place, device=META, draw_token=op, upload=upload)
    mostly = [several] * 31 + [{"top_p": 0.5}]
    rows = [SampleRow(SamplingParams(max_tokens=4, temperature=1.0, **mostly[i % 32]), 5, 1) for i in range(count)]
    logits_RV = torch.empty(count, width, device=META)
    launches = importlib.import_module("rocm_serve.ops.triton_launches.triton")
    with launches.left_out("sm_90"), torch.inference_mode(), Held([logits_RV]) as held:
        assert sampler.draw_rows(logits_RV, rows).shape == (count, 3)
    drawn = step_memory.drawn_bytes(facts, count)
    planned = step_memory.head_bytes(facts, tp, wish(facts, 0, count, 128), 3 * count, drawn)
    assert held.most + logits_RV.nbytes <= planned


def test_scored_prompts_hold_no_more_than_is_planned() -> None:
    """Two slices, while the second is made: the copies that each block takes are smaller than a slice."""
    width = 4096
    sampler = Sampler(Alike(8), vocab_start=0, vocab_local=width, vocab_used=8 * width)
    hidden_RH, targets = torch.zeros(600, 8), list(range(600))
    with torch.inference_mode(), Held([hidden_RH]) as held:
        sampler.prompt_logprobs(lambda x: torch.zeros(len(x), width), hidden_RH, targets, [5] * 600)
    facts = replace(one_period("q38tp8"), vocab_size=8 * width)
    planned = step_memory.head_bytes(facts, 8, wish(facts, 0, 1, 128), 2 * step_rows.SCORED_ROWS, 0)
    assert planned / 2 < held.most <= planned


def test_the_plan_counts_draws_on_the_last_stage_unless_they_are_captured() -> None:
    facts = one_period("q35tp1")
    wished = msgspec.structs.replace(wish(facts, 64, 256, 128), pp=2)
    drawn = 12 * 32 * facts.vocab_size * 4
    for counted in (True, False):
        first, last = (
            step_memory.work_bytes({}, facts, Mesh(1, 2).coord(stage), wished, counted=counted)
            - step_memory.work_bytes({}, facts, Mesh(1, 2).coord(stage), wished, counted=counted, captured=True)
            for stage in (0, 1)
        )
        assert first == 0
        assert last == pytest.approx(drawn * (step_memory.SLACK if counted else 1), abs=1)


def test_nobody_knows_what_other_providers_hold() -> None:
    assert step_memory.counted([("linear", "torch"), ("layers.3.gdn_chunk", "triton"), ("moe_experts", "triton")])
    assert step_memory.counted([("linear", "triton"), ("rms_norm", "reference"), ("add_norm_linear", "reference")])
    assert not step_memory.counted([("gdn_chunk", "triton"), ("layers.3.gdn_chunk", "reference")])
    assert not step_memory.counted([("attention_prefill", "aiter")])
    assert not step_memory.counted([("linear", "aiter")])
    wished = wish(one_period("q35tp1"), 64, 4, 128)
    assert step_memory.counted_before_binding(wished)
    for change in ({"device": "rocm"}, {"op": {"layers.1.gdn_chunk": "reference"}}, {"device": "cpu"}):
        assert not step_memory.counted_before_binding(msgspec.structs.replace(wished, **change))
    for known in ({"rms_norm": "reference"}, {"linear": "torch"}):
        assert step_memory.counted_before_binding(msgspec.structs.replace(wished, op=known))
    for op in ("linear", "fp8_linear", "silu_mul", "sigmoid_mul", "quantise_rows", "draw_token"):
        assert not step_memory.counted([(f"layers.0.{op}", "reference")])
        assert not step_memory.counted_before_binding(msgspec.structs.replace(wished, op={op: "reference"}))


@triton
@pytest.mark.parametrize(
    ("name", "op", "rows"),
    [("dense", "linear", 8), ("dense", "linear", 2048), ("dense", "silu_mul", 2048), ("vl-fp8", "fp8_linear", 2048)],
)
def test_references_that_widen_hold_no_more_than_is_planned(name: str, op: str, rows: int) -> None:
    """A dense layer of 5120 by 17408, whose weight in float32 is more than few rows take, and one period of the 35B."""
    dims = SHAPES["q35tp1"]
    if name == "dense":
        dims = Dims(
            **{"hidden": 5120, "layers": 4, "heads": 24, "kv_heads": 4, "head_dim": 256, "key_heads": 16},
            **{"value_heads": 48, "dense_width": 17408, "vocabulary": 1024, "max_position": 4096},
        )
    made = parse_config(model_config(name, "none", dims, IDS), None)
    facts = replace(made, num_layers=4, layer_types=made.layer_types[:4])
    wished = msgspec.structs.replace(wish(facts, rows, 1, rows), op={op: "reference"})
    ops = bind_ops(wished.op, "sm_90", activation="fp8_1x128")
    found = held_by_layers(facts, ops, wished, (rows,), 0, 0)
    params = stage_params(facts, SOLO, formats=ConfigFormats(facts), mtp=False)
    without_head = {key: param for key, param in params.items() if key != "lm_head.weight"}
    no_head = replace(facts, vocab_size=1)
    counted = step_memory.counted((line.op, line.provider) for line in ops.report)
    assert not counted
    assert found <= step_memory.work_bytes(without_head, no_head, SOLO, wished, counted=counted)


def test_graphs_of_prompts_are_planned_to_take_what_they_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """296 MB on an H200, of four sizes for one prompt and for several, each beside 64 that decode."""
    monkeypatch.setattr(graphs, "prompt_sizes", lambda most: (256, 768, 1024, most))
    monkeypatch.setattr(step_rows, "prompt_counts", lambda resolved: (64,))
    facts = facts_of("q35tp1")
    params = stage_params(facts, SOLO, formats=ConfigFormats(facts), mtp=False)
    wished = msgspec.structs.replace(wish(facts, 2048, 134, 8192), graph_max_batch=1)
    assert 296e6 <= outside_memory.graph_bytes(params, facts, SOLO, wished, counted=True) <= 4 * 296e6


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("drafts", [0, 3])
def test_inputs_of_steps_of_fixed_sizes_are_planned(stage: int, drafts: int) -> None:
    """Every tensor that such steps keep, on a stage that is sent rows and on one that embeds tokens."""
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
            decodes=step_rows.prompt_counts(wished),
            rows=prompt_sizes(step_rows.prompt_rows(wished)),
            prompts=step_rows.prompt_sequences(wished),
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
    planned = step_memory.inputs_bytes(facts, coord, wished)
    assert sum(kept.values()) <= planned <= 1.5 * sum(kept.values())
    assert planned == step_memory.step_bytes({}, facts, coord, wished) - step_memory.work_bytes(
        {}, facts, coord, wished
    )
    if hidden is not None:
        assert planned > (2048 + 64) * hidden * CACHE_ITEMSIZE["bfloat16"]


def test_a_longer_step_and_more_requests_never_cost_less() -> None:
    coord = Mesh(2, 2).coord(3)
    params = stage_params(wishes.facts(), coord, formats=ConfigFormats(wishes.facts()), mtp=False)

    def cost(**changes: int) -> int:
        return step_memory.step_bytes(params, wishes.facts(), coord, resolved(tp=2, pp=2, **changes))

    assert cost() < cost(chunked_prefill_size=512) < cost(chunked_prefill_size=512, max_running_requests=64)


@pytest.mark.parametrize("how", ["off", "graphs", "on"])
def test_rows_between_stages_are_planned_for_every_step_in_flight(how: str) -> None:
    """Those that leave have `pp + 1` slots; of those that come one is asked for ahead for each step in flight."""

    def work(stage: int, how: str) -> int:
        wish = resolved(pp=3, plan_ahead=how, chunked_prefill_size=1000)
        return step_memory.work_bytes({}, wishes.facts(), Mesh(1, 3).coord(stage), wish)

    row = 4 * wishes.facts().hidden_size * step_rows.most_rows(resolved(chunked_prefill_size=1000))
    asked = 3 if how == "off" else 4
    assert work(1, how) - work(0, how) == asked * row
    assert work(0, how) == work(0, "off")
    assert work(2, how) - work(2, "off") == (asked - 3) * row


def test_the_budget_counts_the_slices_that_the_sampler_makes() -> None:
    assert step_rows.SCORED_ROWS == vocab_shard.SLICE_ROWS
    assert step_memory.DRAWN_ROWS == DRAWN_ROWS
