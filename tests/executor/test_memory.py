"""The byte arithmetic: equal to what torch allocates, and never more pages or slots than any rank affords."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from rocm_serve.cache.allocate import KV_DTYPES, allocate_stage_cache, cache_bytes
from rocm_serve.checkpoint.synthetic_configs import DIMS, model_config
from rocm_serve.config import graphs
from rocm_serve.errors import UserError
from rocm_serve.executor import memory, sampler, step_memory, vocab_shard
from rocm_serve.executor.memory import bytes_for_caches, cpu_memory, effective_limits, layout_of, page_bytes, slot_bytes
from rocm_serve.messages import EffectiveLimits, WorkerLoaded, WorkerReady
from rocm_serve.models.qwen3_5.spec import ConfigFormats, parse_config, stage_params
from rocm_serve.parallel.layout import bytes_at, shape_at
from rocm_serve.parallel.mesh import Mesh
from tests.executor.wishes import IDS, facts, resolved


def loaded(rank: int, cache: int, page: int, slot: int) -> WorkerLoaded:
    return WorkerLoaded(rank, 1, cache, page, slot)


@pytest.mark.parametrize("kv", list(KV_DTYPES))
@pytest.mark.parametrize(("tp", "pp", "rank"), [(1, 1, 0), (2, 1, 1), (4, 1, 2), (1, 2, 0), (2, 2, 3), (1, 8, 7)])
def test_page_and_slot_bytes_equal_allocated_ones(tp: int, pp: int, rank: int, kv: str) -> None:
    wish = resolved(tp=tp, pp=pp, kv_cache_dtype=kv, dtype="bfloat16")
    coord = Mesh(tp, pp).coord(rank)
    pages, slots = 7, 3
    cache = allocate_stage_cache(
        layout_of(facts(), coord, wish),
        num_pages=pages,
        num_slots=slots,
        kv_dtype=KV_DTYPES[kv],
        conv_dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    expected = pages * page_bytes(facts(), coord, wish) + (slots + 1) * slot_bytes(facts(), coord, wish)
    assert cache_bytes(cache) == expected


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 2), (4, 2)])
def test_weight_bytes_equal_those_of_tensors_of_the_local_shapes(tp: int, pp: int) -> None:
    wish = resolved(tp=tp, pp=pp)
    total = 0
    for rank in range(tp * pp):
        coord = Mesh(tp, pp).coord(rank)
        params = stage_params(facts(), coord, formats=ConfigFormats(facts()), mtp=False)
        planned = memory.weight_bytes(params, coord, wish)
        shapes = [shape_at(p, coord.place) for p in params.values()]
        assert planned == sum(torch.empty(s, device="meta").nbytes for s in shapes)
        total += planned
    assert total > 0


budgets = st.lists(
    st.tuples(st.integers(1, 10**7), st.sampled_from([0, 64, 640, 1000]), st.sampled_from([0, 500, 12345])),
    min_size=4,
    max_size=4,
)


@given(budgets, st.integers(1, 100), st.sampled_from([1, 16, 64]), st.integers(1, 2000), st.booleans())
def test_limits_fit_every_rank_and_hold_one_full_request(
    costs: Sequence[tuple[int, int, int]], wish: int, page_size: int, length: int, capped: bool
) -> None:
    assume(any(page or slot for _, page, slot in costs))
    ranks = [loaded(rank, *cost) for rank, cost in enumerate(costs)]
    wished = resolved(
        tp=2,
        pp=2,
        max_running_requests=wish,
        page_size=page_size,
        max_model_len=length,
        max_total_tokens=3 * length + page_size if capped else None,
    )
    try:
        limits = effective_limits(wished, ranks)
    except UserError as error:
        least = -(-length // page_size)
        assert any(c < least * p + 2 * s for c, p, s in costs), error
        return
    assert 1 <= limits.max_running_requests == limits.num_slots <= wish
    assert limits.num_pages * page_size >= length
    assert not capped or limits.num_pages * page_size <= 3 * length + page_size
    assert limits.num_pages <= limits.num_slots * -(-length // page_size)
    for cache, page, slot in costs:
        assert limits.num_pages * page + (limits.num_slots + 1) * slot <= cache
    assert (limits.num_slots < wish) == ("lowered from" in limits.reasons["max_running_requests"])


def test_the_rank_that_limits_is_named_with_its_stage() -> None:
    wish = resolved(tp=1, pp=2, max_running_requests=100, max_model_len=64)
    limits = effective_limits(wish, [loaded(0, 10**9, 1000, 1000), loaded(1, 100_000, 1000, 10_000)])
    assert limits.num_slots == 4 and limits.num_pages == 4 * 4
    assert "rank 1 (stage 1)" in limits.reasons["num_slots"]
    assert "lowered from 100" in limits.reasons["max_running_requests"]
    tight = effective_limits(wish, [loaded(0, 10_000, 1000, 0), loaded(1, 100_000, 0, 0)])
    assert tight.num_pages == 10 and "rank 0 (stage 0)" in tight.reasons["num_pages"]


def test_every_limit_has_its_reason() -> None:
    limits = effective_limits(resolved(), [loaded(0, 10**9, 1000, 1000)])
    assert set(limits.reasons) == set(EffectiveLimits.__struct_fields__) - {"reasons", "by_reference"}
    chosen = effective_limits(resolved(page_size=32), [loaded(0, 10**9, 1000, 1000)])
    default = effective_limits(resolved(page_size=16), [loaded(0, 10**9, 1000, 1000)])
    assert (chosen.reasons["page_size"], default.reasons["page_size"]) == ("--page-size", "default")


def test_a_cap_on_total_tokens_is_obeyed_and_named() -> None:
    limits = effective_limits(resolved(max_total_tokens=300), [loaded(0, 10**9, 1000, 1000)])
    assert limits.num_pages == 300 // 16 and "--max-total-tokens 300" in limits.reasons["num_pages"]
    with pytest.raises(UserError, match=r"--max-total-tokens 255 holds no request .* legal: at least 256"):
        effective_limits(resolved(max_total_tokens=255), [loaded(0, 10**9, 1000, 1000)])


def test_a_request_that_does_not_fit_is_refused_with_the_length_that_does() -> None:
    with pytest.raises(UserError) as refusal:
        effective_limits(resolved(max_model_len=4096), [loaded(0, 100_000, 1000, 10_000)])
    advised = re.search(r"--max-model-len (\d+) fits", str(refusal.value))
    assert advised is not None and "\n" not in str(refusal.value)
    length = int(advised[1])
    effective_limits(resolved(max_model_len=length), [loaded(0, 100_000, 1000, 10_000)])
    with pytest.raises(UserError):
        effective_limits(resolved(max_model_len=length + 1), [loaded(0, 100_000, 1000, 10_000)])


def test_a_model_that_does_not_fit_is_refused_in_one_line() -> None:
    with pytest.raises(UserError, match=r"rank 3 may use 1 GB .* weights take 900 MB and one step up to 200 MB") as e:
        bytes_for_caches(3, 10**9, 900 * 10**6, 200 * 10**6)
    assert "\n" not in str(e.value)
    assert bytes_for_caches(0, 100, 60, 30) == 10


def test_what_others_hold_of_a_gpu_is_said_instead_of_a_negative_budget() -> None:
    total, free = 150 * 10**9, 12 * 10**9
    allowed = memory.gpu_memory(total, free, resolved(mem_fraction=0.9))
    assert allowed == -3 * 10**9
    words = (
        r"rank 0 may use 0 bytes \(--mem-fraction\) beside 138 GB of its GPU that are in use already, but its weights"
        r" take 20 GB and one step up to 1 GB; without those it might use 135 GB: end what holds them"
    )
    with pytest.raises(UserError, match=words):
        bytes_for_caches(0, allowed, 20 * 10**9, 10**9, held=total - free)


def test_a_model_that_would_not_fit_an_idle_gpu_is_not_blamed_on_others() -> None:
    with pytest.raises(UserError, match=r"may use 134 GB .* beside 1 GB of its GPU .*; raise --mem-fraction, --tp"):
        bytes_for_caches(0, 134 * 10**9, 140 * 10**9, 10**9, held=10**9)


def test_workers_of_a_host_share_its_free_memory() -> None:
    assert cpu_memory(8000, resolved(mem_fraction=0.5)) == 4000
    assert cpu_memory(8000, resolved(mem_fraction=0.5, tp=2, pp=2)) == 1000


def test_a_longer_step_and_more_requests_never_cost_less() -> None:
    coord = Mesh(2, 2).coord(3)
    params = stage_params(facts(), coord, formats=ConfigFormats(facts()), mtp=False)

    def cost(**changes: int) -> int:
        return memory.step_bytes(params, facts(), coord, resolved(tp=2, pp=2, **changes))

    assert cost() < cost(chunked_prefill_size=512) < cost(chunked_prefill_size=512, max_running_requests=64)


@pytest.mark.parametrize("how", ["off", "graphs", "on"])
def test_rows_between_stages_are_planned_for_every_step_in_flight(how: str) -> None:
    """Those that leave have `pp + 1` slots; of those that come one is asked for ahead for each step in flight."""

    def work(stage: int, how: str) -> int:
        wish = resolved(pp=3, plan_ahead=how, chunked_prefill_size=1000)
        return memory.work_bytes({}, facts(), Mesh(1, 3).coord(stage), wish)

    row = 4 * facts().hidden_size * memory.step_rows(resolved(chunked_prefill_size=1000))
    asked = 3 if how == "off" else 4
    assert work(1, how) - work(0, how) == asked * row
    assert work(0, how) == work(0, "off")
    assert work(2, how) - work(2, "off") == (asked - 3) * row


def test_the_budget_counts_the_slices_that_the_sampler_makes() -> None:
    assert memory.SCORED_ROWS == vocab_shard.SLICE_ROWS
    assert step_memory.DRAWN_ROWS == sampler.DRAWN_ROWS


def test_preparation_takes_the_largest_group_of_weights_that_a_provider_lays_out() -> None:
    wish = resolved(tp=2, dtype="bfloat16")
    coord = Mesh(2, 1).coord(1)
    params = stage_params(facts(), coord, formats=ConfigFormats(facts()), mtp=False)
    sizes = {name: bytes_at(p, coord.place, model_itemsize=2) for name, p in params.items()}

    def preparing(*ops: str) -> int:
        return memory.preparation_bytes(params, coord, wish, ops)

    experts = sizes["model.layers.0.mlp.experts.gate_up_proj"] + sizes["model.layers.0.mlp.experts.down_proj"]
    assert preparing("moe_experts") == experts
    ends = ("proj.weight", "_qkvz.weight", "_ba.weight", "gate.weight", "lm_head.weight")
    matrices = [name for name in sizes if name.endswith(ends)]
    assert preparing("linear") == max(sizes[name] for name in matrices)
    assert preparing("fp8_linear") == 0, "no weight of this checkpoint is FP8"
    assert preparing("moe_experts", "linear") == max(experts, preparing("linear"))
    assert preparing() == 0 == preparing("rms_norm")


def test_preparation_counts_a_weight_together_with_its_scale() -> None:
    fp8 = parse_config(model_config("text-fp8", "none", DIMS["default"], IDS), None)
    coord = Mesh(1, 1).coord(0)
    params = stage_params(fp8, coord, formats=ConfigFormats(fp8), mtp=False)
    sizes = {name: bytes_at(p, coord.place, model_itemsize=4) for name, p in params.items()}
    first = "model.layers.0.mlp.experts."
    assert memory.preparation_bytes(params, coord, resolved(), ["moe_experts"]) == sum(
        size for name, size in sizes.items() if name.startswith(first)
    )
    assert sizes[f"{first}down_proj_scale_inv"] > 0


def test_weights_that_fit_but_cannot_be_laid_out_are_refused_with_the_way_out() -> None:
    memory.check_preparation(1, allowed=1000, weights=900, preparing=100)
    memory.check_preparation(1, allowed=800, weights=900, preparing=0)  # bytes_for_caches says that
    with pytest.raises(UserError, match="rank 1 may use 1 KB .* 900 bytes, .* 101 bytes more .*--op OP=reference"):
        memory.check_preparation(1, allowed=1000, weights=900, preparing=101)


@pytest.mark.parametrize(("tp", "pp", "rank"), [(1, 1, 0), (2, 2, 0), (2, 2, 3)])
def test_graphs_cost_a_step_of_the_largest_batch_and_what_every_size_leaves(
    monkeypatch: pytest.MonkeyPatch, tp: int, pp: int, rank: int
) -> None:
    """Two sizes more, 16 and 32: only what they leave, their nodes, and the larger pool come on top."""
    coord = Mesh(tp, pp).coord(rank)
    params = stage_params(facts(), coord, formats=ConfigFormats(facts()), mtp=False)

    def costs(most: int) -> int:
        wish = resolved(tp=tp, pp=pp, device="rocm", dtype="bfloat16", graph_max_batch=most, max_running_requests=64)
        return memory.graph_bytes(params, facts(), coord, wish)

    def step(most: int, rows: int) -> int:
        wish = resolved(
            tp=tp, pp=pp, device="rocm", dtype="bfloat16", max_running_requests=most, chunked_prefill_size=rows
        )
        return memory.work_bytes(params, facts(), coord, wish, captured=True)

    def pool(most: int) -> int:
        """Of steps that decode, and of the 64 rows of a prompt beside 64 that decode, whichever is larger."""
        return max(step(most, 0), step(64, 64))

    assert costs(0) == 0
    row = 4 * facts().vocab_size // tp if coord.last_stage else 0
    row += 2 * facts().hidden_size
    layers = facts().num_layers // pp
    nodes = 2 * layers * memory.GRAPH_NODES_OF_LAYER * memory.GRAPH_NODE_BYTES
    assert costs(32) - costs(8) == pool(32) - pool(8) + 48 * row + nodes
    with_prompts = costs(8)
    monkeypatch.setattr(graphs, "PROMPTS", 1)  # 64 rows of several prompts beside 64 that decode: a graph less
    assert with_prompts - costs(8) == 128 * 2 * facts().hidden_size + nodes // 2
    monkeypatch.setattr(graphs, "PROMPT_ROWS", 0)  # 64 rows of a prompt, alone and beside 64: three graphs less
    left = (64 + 128 + 128) * 2 * facts().hidden_size
    assert with_prompts - costs(8) == pool(8) - step(8, 0) + left + nodes * 3 // 2


@pytest.mark.parametrize("rank", [0, 3])
def test_graphs_of_steps_with_drafts_cost_their_rows_and_a_second_set_of_sizes(rank: int) -> None:
    """128 requests or 64 at most: with K = 3 there are no more than 64 with drafts, so only plain sizes are added."""
    coord, made = Mesh(2, 2).coord(rank), replace(facts(), mtp_layers=1)
    params = stage_params(made, coord, formats=ConfigFormats(made), mtp=True)

    def costs(most: int, drafts: int) -> int:
        sizes: dict[str, object] = {
            "tp": 2,
            "pp": 2,
            "device": "rocm",
            "dtype": "bfloat16",
            "max_running_requests": 200,
        }
        return memory.graph_bytes(params, made, coord, resolved(**sizes, graph_max_batch=most, draft_tokens=drafts))

    row = 2 * made.hidden_size + (2 * made.vocab_size if coord.last_stage else 0)
    nodes = 2 * (made.num_layers // 2 + 3) * memory.GRAPH_NODES_OF_LAYER * memory.GRAPH_NODE_BYTES
    assert costs(0, 3) == 0
    assert costs(128, 3) - costs(64, 3) == 128 * row + nodes
    assert costs(64, 3) - costs(64, 0) > (4 * 127) * row


def test_graphs_of_all_ranks_count_as_far_as_every_rank_has_them() -> None:
    limits = EffectiveLimits(256, 8, 64, 16, 100, 8, reasons={"num_slots": "memory"})
    ready = [
        WorkerReady(0, 8, "captured in 1 s", {"kv_write": "slow"}),
        WorkerReady(1, 0, "kv_write by reference", {"kv_write": "slow", "linear": "too"}),
        WorkerReady(2, 8, "x"),
    ]
    found = memory.with_graphs(limits, ready)
    assert found.graph_max_batch == 0
    assert found.reasons == {"num_slots": "memory", "graph_max_batch": "kv_write by reference"}
    assert found.by_reference == {"kv_write": "slow", "linear": "too"}
    assert memory.with_graphs(limits, ready[:1]).graph_max_batch == 8
    assert memory.with_graphs(limits, ready[:1], "graphs").plan_ahead
    none = memory.with_graphs(limits, ready, "graphs")
    assert not none.plan_ahead, "steps are planned ahead where all have graphs"
    assert none.reasons["plan_ahead"] == "auto: no decode step is captured"


@pytest.mark.parametrize(
    ("tp", "pp", "how", "by_stage"),
    [(1, 1, "on", [0]), (2, 1, "on", [1]), (1, 3, "off", [1, 2, 1]), (1, 3, "on", [2, 2, 2]), (2, 2, "on", [3, 3])],
)
def test_communicators_are_those_of_a_stage_and_of_each_edge(tp: int, pp: int, how: str, by_stage: list[int]) -> None:
    wish = resolved(device="cuda", tp=tp, pp=pp, plan_ahead=how)
    one = memory.CHANNELS * memory.CONNECTIONS * memory.CONNECTION_BYTES
    mesh = Mesh(tp=tp, pp=pp)
    held = [memory.communicator_bytes(mesh.coord(mesh.tp_group(stage)[-1]), wish) for stage in range(pp)]
    assert held == [count * one for count in by_stage]
    assert memory.communicator_bytes(mesh.coord(0), resolved(tp=tp, pp=pp, plan_ahead=how)) == 0
