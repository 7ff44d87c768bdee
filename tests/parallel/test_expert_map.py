"""Which rank holds which expert: slots go rank by rank, and every expert has at least one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocm_serve.errors import UserError
from rocm_serve.parallel.expert_map import DRAFT_LAYER, ExpertMap, ExpertPlan, plain_map


@given(
    experts=st.integers(1, 9), copies=st.lists(st.integers(0, 100), max_size=9), ep=st.integers(1, 6), data=st.data()
)
def test_a_map_holds_every_expert_and_its_ranks_partition_the_slots(
    experts: int, copies: list[int], ep: int, data: st.DataObject
) -> None:
    slots = data.draw(st.permutations([*range(experts), *(extra % experts for extra in copies)]))
    if len(slots) % ep:
        with pytest.raises(UserError, match=rf"{len(slots)} expert slots cannot be shared by --ep {ep} equally"):
            ExpertMap(tuple(slots), ep)
        return
    made = ExpertMap(tuple(slots), ep)
    held = [made.held_by(rank) for rank in range(ep)]
    assert [len(one) for one in held] == [made.slots_per_rank] * ep
    assert [expert for one in held for expert in one] == slots
    assert made.is_plain == (slots == sorted(slots) and len(slots) == experts)


def test_an_expert_on_no_rank_is_refused() -> None:
    with pytest.raises(UserError, match=r"experts \[1, 3\] are on no rank"):
        ExpertMap((0, 2, 4, 0), 2)


def test_layers_that_no_map_names_are_plain() -> None:
    moved = ExpertMap((1, 0, 3, 2), 2)
    plan = ExpertPlan(2, shared_whole=True, maps={3: moved})
    assert plan.of_layer(3, 4) is moved and plan.slots_of(3, 4) == (1, 0, 3, 2)
    assert plan.of_layer(2, 4) == plain_map(4, 2) and plan.slots_of(2, 4) == (0, 1, 2, 3)
    assert plain_map(4, 2).is_plain and not moved.is_plain
    assert [plain_map(8, 4).held_by(rank) for rank in range(4)] == [(0, 1), (2, 3), (4, 5), (6, 7)]


def test_the_shared_expert_of_the_draft_layer_has_a_flag_of_its_own() -> None:
    plan = ExpertPlan(2, shared_whole=True)
    assert plan.shared_is_whole(0) and not plan.shared_is_whole(DRAFT_LAYER)
    plan = ExpertPlan(2, draft_shared_whole=True)
    assert plan.shared_is_whole(DRAFT_LAYER) and not plan.shared_is_whole(0)
