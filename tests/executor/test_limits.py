"""Pages and slots: never more than any rank affords, each number with its reason."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rocm_serve.errors import UserError
from rocm_serve.executor.limits import effective_limits, with_graphs
from rocm_serve.messages import EffectiveLimits, WorkerLoaded, WorkerReady
from tests.executor.wishes import resolved


def loaded(rank: int, cache: int, page: int, slot: int) -> WorkerLoaded:
    return WorkerLoaded(rank, 1, cache, page, slot)


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


def test_graphs_of_all_ranks_count_as_far_as_every_rank_has_them() -> None:
    limits = EffectiveLimits(256, 8, 64, 16, 100, 8, reasons={"num_slots": "memory"})
    ready = [
        WorkerReady(0, 8, "captured in 1 s", {"kv_write": "slow"}),
        WorkerReady(1, 0, "kv_write by reference", {"kv_write": "slow", "linear": "too"}),
        WorkerReady(2, 8, "x"),
    ]
    found = with_graphs(limits, ready)
    assert found.graph_max_batch == 0
    assert found.reasons == {"num_slots": "memory", "graph_max_batch": "kv_write by reference"}
    assert found.by_reference == {"kv_write": "slow", "linear": "too"}
    assert with_graphs(limits, ready[:1]).graph_max_batch == 8
    assert with_graphs(limits, ready[:1], "graphs").plan_ahead
    none = with_graphs(limits, ready, "graphs")
    assert not none.plan_ahead, "steps are planned ahead where all have graphs"
    assert none.reasons["plan_ahead"] == "auto: no decode step is captured"
