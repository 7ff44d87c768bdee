"""Gated DeltaNet under drafts: accept m of n, go on: the bits of plain steps. And layouts that would not give them."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from rocm_serve.ops.batch import Replay, Sequences
from rocm_serve.ops.bind import bind_ops
from rocm_serve.ops.inputs import sequences_of
from rocm_serve.ops.replay import replay_of
from tests.layers.replaying import Run, all_rows, altered, at_random, every_pair, facts_of, in_step, layer_of

OPS = bind_ops({}, "cpu")
MOST = 4
SIZES: list[dict[str, int]] = [
    {"key": 128, "value": 128},
    {"key": 20, "value": 37, "key_heads": 1, "value_heads": 3},
    {"key": 64, "value": 24, "key_heads": 4, "value_heads": 4},
]


def run_of(sizes: dict[str, int], seed: int, draft_tokens: int = MOST) -> Run:
    print(f"seed {seed}")
    g = torch.Generator().manual_seed(seed)
    facts = facts_of(**sizes)
    return Run(layer_of(facts, OPS, g), facts, g, draft_tokens)


@pytest.mark.parametrize("known", [1, 3])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_accepting_m_of_n_drafts_is_m_plain_steps_for_every_m_and_n(sizes: dict[str, int], known: int) -> None:
    run, requests = run_of(sizes, secrets.randbits(31)), every_pair(MOST, known)
    run.plainly(requests)
    assert not run.differences(requests, in_step(requests))


@pytest.mark.parametrize("draft_tokens", [1, 4])
def test_requests_that_come_and_go_in_any_order(draft_tokens: int) -> None:
    run = run_of(SIZES[1], secrets.randbits(31), draft_tokens)
    for _ in range(3):
        requests, steps = at_random(run.g, 9, draft_tokens)
        run.plainly(requests)
        assert not run.differences(requests, steps)


def advanced(run: Run) -> None:
    altered(run, lambda made: replace(made, sequences=all_rows(made.sequences)))


def window_advanced(run: Run) -> None:
    conv = OPS.causal_conv
    run.layer.ops = replace(OPS, causal_conv=lambda u, w, s, sequences: conv(u, w, s, all_rows(sequences)))


def state_advanced(run: Run) -> None:
    rule = OPS.gdn_decode

    def gdn_decode(*arguments: Any) -> torch.Tensor:
        return rule(*arguments[:8], all_rows(arguments[8]), *arguments[9:])

    run.layer.ops = replace(OPS, gdn_decode=gdn_decode)


def of_another_slot(run: Run) -> None:
    altered(run, lambda made: replace(made, sources_R=made.sources_R + run.draft_tokens))


def kept_for_another_slot(run: Run) -> None:
    altered(run, lambda made: replace(made, targets_D=made.targets_D.flip(0)))


def from_the_last_one(run: Run) -> None:
    """The last of the pending drafts, not the first ones."""
    altered(run, lambda made: replace(made, sources_R=made.sources_R // run.draft_tokens * run.draft_tokens + 1))


def all_accepted(run: Run) -> None:
    """Plans that carry how many were drafted instead of how many were accepted."""
    last: dict[int, int] = {}

    def plan(sequences: Sequences, accepted: Sequence[int], drafts: Sequence[int], most: int) -> Replay | None:
        told = [last.get(slot, 0) if count else 0 for slot, count in zip(sequences.slots, accepted, strict=True)]
        last.update(zip(sequences.slots, drafts, strict=True))
        return replay_of(sequences, told, drafts, most)

    run.plan = plan


def none_replayed(run: Run) -> None:
    run.plan = lambda sequences, accepted, drafts, most: replay_of(sequences, [0] * len(accepted), drafts, most)


NAIVE: list[Callable[[Run], None]] = [
    advanced,
    window_advanced,
    state_advanced,
    of_another_slot,
    kept_for_another_slot,
    from_the_last_one,
    all_accepted,
    none_replayed,
]


@pytest.mark.parametrize("plant", NAIVE, ids=lambda plant: plant.__name__)
def test_the_same_requests_show_what_a_naive_layout_gets_wrong(plant: Callable[[Run], None]) -> None:
    run, requests = run_of(SIZES[1], secrets.randbits(31), 3), every_pair(3, 1)
    run.plainly(requests)
    plant(run)
    found = run.differences(requests, in_step(requests))
    assert any("results" in line for line in found) and any("states" in line for line in found)


def test_a_step_without_drafts_is_laid_out_as_ever() -> None:
    sequences, _ = sequences_of(torch.Generator().manual_seed(1), (1, 3, 2), (5, 6, 0))
    assert replay_of(replace(sequences, num_recurrent=2), (0, 0, 0), (0, 0, 0), 4) is None


def test_extended_rows_commits_and_places_by_hand() -> None:
    """Slots 3, 1, 2; 2 accepted of the first, 2 drafts of the second, a prompt last."""
    made, _ = sequences_of(torch.Generator().manual_seed(1), (1, 3, 2), (5, 6, 0))
    sequences = replace(made, num_recurrent=2, slots=(3, 1, 2), slots_B=torch.tensor([3, 1, 2], dtype=torch.int32))
    replay = replay_of(sequences, (2, 0, 0), (0, 2, 0), 4)
    assert replay is not None
    run = replay.sequences
    assert run.row_starts == (0, 3, 6) and run.commits == (3, 1) and run.slots == (3, 1) and run.contexts == (3, 6)
    assert run.num_recurrent == run.num_sequences == 2
    for held, told in ((run.row_starts_B1, (0, 3, 6)), (run.commits_B, (3, 1)), (run.contexts_B, (3, 6))):
        assert held is not None and held.dtype == torch.int32 and held.tolist() == list(told)
    assert replay.own_N.tolist() == [2, 3, 4, 5]
    assert replay.replayed_R.tolist() == [0, 1] and replay.sources_R.tolist() == [12, 13]
    assert replay.drafts_D.tolist() == [2, 3] and replay.targets_D.tolist() == [4, 5]


@pytest.mark.parametrize(("accepted", "drafts"), [((5, 0), (0, 0)), ((0, 0), (1, 0)), ((0, 1), (0, 0)), ((0,), (1,))])
def test_what_no_step_may_hold_is_asserted(accepted: tuple[int, ...], drafts: tuple[int, ...]) -> None:
    """More accepted than drafted, drafts without a known row, drafts in a prompt, numbers for other sequences."""
    sequences, _ = sequences_of(torch.Generator().manual_seed(1), (1, 3), (5, 0))
    with pytest.raises(AssertionError):
        replay_of(replace(sequences, num_recurrent=1), accepted, drafts, 4)
