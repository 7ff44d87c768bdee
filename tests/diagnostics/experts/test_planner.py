"""The planner keeps its promises on any counts, and does well on skewed ones."""

from __future__ import annotations

import random
from collections import Counter
from math import isclose

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocm_serve.diagnostics.experts.planner import imbalance, pack, plan_layer
from rocm_serve.errors import UserError


def shares(slots: tuple[int, ...], ep: int) -> list[tuple[int, ...]]:
    each = len(slots) // ep
    return [slots[rank * each : (rank + 1) * each] for rank in range(ep)]


@st.composite
def wishes(draw: st.DrawFn) -> tuple[list[int], int, int]:
    """Counts of E experts, ep, and a legal number of copies. Few different values: ties are where order shows."""
    ep = draw(st.integers(1, 6))
    experts = draw(st.integers(1, 24))
    chosen = draw(st.lists(st.integers(0, 9) | st.integers(0, 10**9), min_size=experts, max_size=experts))
    least, most = -experts % ep, experts * (ep - 1)
    redundant = least + ep * draw(st.integers(0, (most - least) // ep))
    return chosen, ep, redundant


@given(wishes())
def test_the_invariants(wish: tuple[list[int], int, int]) -> None:
    chosen, ep, redundant = wish
    plan = plan_layer(chosen, ep, redundant)
    copies = Counter(plan.slots)
    assert set(copies) == set(range(len(chosen))), "each expert is somewhere"
    assert len(plan.slots) % ep == 0 and len(plan.slots) <= len(chosen) + redundant
    ranks = shares(plan.slots, ep)
    assert all(len(set(rank)) == len(rank) for rank in ranks), "no rank holds an expert twice"
    for rank, load in zip(ranks, plan.planned, strict=True):
        assert isclose(load, sum(chosen[e] / copies[e] for e in rank), rel_tol=1e-9, abs_tol=1e-9)
    assert isclose(sum(plan.planned), sum(chosen), rel_tol=1e-9)
    if len(chosen) % ep == 0:
        each = len(chosen) // ep
        assert list(plan.plain) == [sum(chosen[r * each : (r + 1) * each]) for r in range(ep)]
        assert max(plan.planned) <= max(plan.plain) and imbalance(plan.planned) <= imbalance(plan.plain)
    else:
        assert plan.plain == () and len(plan.slots) == len(chosen) + redundant
    assert plan_layer(chosen, ep, redundant) == plan, "the same counts give the same slots"


@given(wishes(), st.integers(1, 40))
def test_slots_that_cannot_be_shared_are_refused(wish: tuple[list[int], int, int], more: int) -> None:
    chosen, ep, redundant = wish
    wrong = redundant + more
    if more % ep == 0 and wrong <= len(chosen) * (ep - 1):
        return
    with pytest.raises(UserError, match=f"--redundant {wrong}: .*--ep {ep} equally.*legal: {-len(chosen) % ep}"):
        plan_layer(chosen, ep, wrong)


def test_a_hot_expert_is_copied_and_the_rest_is_spread() -> None:
    chosen = [800, 100, 100, 100, 100, 100, 100, 100]
    plan = plan_layer(chosen, 4, 4)
    assert Counter(plan.slots)[0] == 4, "one on each rank"
    assert plan.plain == (900, 200, 200, 200)
    assert max(plan.planned) <= 400 and plan.copies == 4


def test_copies_that_do_not_help_are_not_made() -> None:
    even = plan_layer([5] * 8, 4, 4)
    assert even.slots == tuple(range(8)) and even.copies == 0
    assert plan_layer([5, 0, 3, 2], 2, 2).planned == (5, 5), "where packing with copies is worse than in order"


@pytest.mark.parametrize("chosen", [[0] * 8, [7] + [0] * 7])
def test_layers_that_saw_little_are_placed_too(chosen: list[int]) -> None:
    plan = plan_layer(chosen, 2, 0)
    assert sorted(plan.slots) == list(range(8))
    assert imbalance(plan.planned) == (2.0 if any(chosen) else 1.0)


def test_skew_as_of_a_real_router_is_levelled() -> None:
    """512 experts by Zipf's law over 8 ranks: one in twenty copies brings the busiest rank close to the mean."""
    rng = random.Random(5)
    chosen = [int(1e6 / (1 + n)) for n in range(512)]
    rng.shuffle(chosen)
    before, packed, copied = (plan_layer(chosen, 8, redundant) for redundant in (0, 0, 24))
    assert imbalance(before.plain) > 1.3
    assert imbalance(packed.planned) < imbalance(packed.plain)
    assert imbalance(copied.planned) < 1.01


def test_when_only_a_slot_beside_a_copy_is_left_two_experts_change_places() -> None:
    """The large one holds rank 0 back until rank 1 is full: both copies of expert 4 would go to rank 0."""
    items = [(10, 0), (4, 1), (3, 2), (2, 3), (1, 4), (1, 4)]
    ranks = pack(items, 2)
    assert [sorted(expert for _, expert in rank) for rank in ranks] == [[0, 3, 4], [1, 2, 4]]


@given(st.data())
def test_packing_any_items_never_puts_an_expert_on_a_rank_twice(data: st.DataObject) -> None:
    """Also such as copying the hottest would not make."""
    ep = data.draw(st.integers(1, 5))
    each = data.draw(st.integers(1, 5))
    items: list[tuple[int, int]] = []
    while len(items) < ep * each:
        copies = data.draw(st.integers(1, min(ep, ep * each - len(items))))
        items += [(data.draw(st.sampled_from([0, 1, 2, 5, 50])), len(items))] * copies
    ranks = pack(items, ep)
    assert sorted(item for rank in ranks for item in rank) == sorted(items)
    for rank in ranks:
        assert len({expert for _, expert in rank}) == len(rank) == each
