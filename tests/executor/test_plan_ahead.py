"""Steps that run before the tokens of those before them are known: the same tokens, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rocm_serve.config.schema import Resolved
from rocm_serve.executor.loaded_stage import LoadedStage
from rocm_serve.executor.local import LocalExecutor
from rocm_serve.executor.runner import StageRunner
from rocm_serve.types import FinishReason, SamplingParams
from tests.executor.generate import Answer, Requests, Session, session
from tests.executor.recorded import Recorded, with_graphs
from tests.executor.simulated import SimulatedExecutor
from tests.executor.wishes import resolved

MOST = 5  # of up to eight at a time: larger batches are not captured
TIGHT: dict[str, Any] = {"page_size": 2, "max_model_len": 60, "max_total_tokens": 60}

FILTERS: dict[int, dict[str, Any]] = {3: {"top_k": 7, "top_p": 0.9}, 5: {"top_p": 0.8}, 7: {"min_p": 0.02}}


def wish(checkpoint: Path, **changes: Any) -> Resolved:
    return resolved(model=str(checkpoint), graph_max_batch=MOST, **changes)


def requests(ends: dict[str, int]) -> Requests:
    """Greedy, drawn and filtered, short and long; `ends`: a token that ends the answer, by request."""
    return {
        f"r{i}": (
            tuple(100 + 7 * i + j for j in range(1 + 4 * i)),
            SamplingParams(
                max_tokens=(3, 1, 12, 17, 6, 24, 9, 14, 20, 2)[i],
                temperature=0.8 * (i % 2),
                seed=i,
                **FILTERS.get(i, {}),
                stop_token_ids=(ends[f"r{i}"],) if f"r{i}" in ends else (),
            ),
        )
        for i in range(10)
    }


@pytest.fixture(scope="module")
def plainly(checkpoint: Path) -> dict[str, Answer]:
    with session(SimulatedExecutor(wish(checkpoint))) as plain:
        return plain.generate(requests({}))


@pytest.fixture(scope="module")
def ends(plainly: dict[str, Answer]) -> dict[str, int]:
    """A token in the middle of some answers, at its first place there."""
    return {name: plainly[name].tokens[len(plainly[name].tokens) // 2] for name in ("r2", "r3", "r5", "r7")}


def judge(ahead: Session, plainly: dict[str, Answer], ends: dict[str, int]) -> None:
    answers = ahead.generate(requests(ends))
    assert ahead.deepest == 2, "nothing was planned ahead"
    for name, answer in answers.items():
        whole = plainly[name].tokens
        if name in ends:
            assert answer.tokens == whole[: whole.index(ends[name]) + 1] and answer.finish_reason is FinishReason.STOP
        else:
            assert answer == plainly[name]
    assert ahead.stats.pages_used == ahead.stats.slots_used == 0


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("room", [{}, TIGHT], ids=["roomy", "tight"])
def test_tokens_are_those_of_steps_one_after_the_other(
    checkpoint: Path, plainly: dict[str, Answer], ends: dict[str, int], tp: int, graphs: bool, room: dict[str, Any]
) -> None:
    """Two shards of the vocabulary draw the same here too: no two best logits of these requests are close."""
    recorder = Recorded()

    def changed(part: LoadedStage, own: StageRunner) -> StageRunner:
        return with_graphs(part, own, recorder, poisoned=not room) if graphs else own

    with session(SimulatedExecutor(wish(checkpoint, tp=tp, plan_ahead="on", **room), changed)) as ahead:
        judge(ahead, plainly, ends)
        assert bool(ahead.stats.preemptions) == bool(room) and bool(recorder.sizes) == graphs
        judge(ahead, plainly, ends)  # slots and pages have had other owners


def test_in_one_process_too(checkpoint: Path, plainly: dict[str, Answer], ends: dict[str, int]) -> None:
    with session(LocalExecutor(wish(checkpoint, plan_ahead="on"))) as ahead:
        assert ahead.limits.plan_ahead and ahead.executor.depth == 2
        judge(ahead, plainly, ends)


def test_requests_that_need_the_host_run_beside_others(
    checkpoint: Path, plainly: dict[str, Answer], mixed_requests: Requests
) -> None:
    """Penalties and log-probs: the steps that name them have nothing behind them, those before and after do."""
    some = {name: requests({})[name] for name in ("r3", "r5")}
    with session(SimulatedExecutor(wish(checkpoint))) as plain:
        expected = plain.generate(mixed_requests)
    recorder = Recorded()
    with session(
        SimulatedExecutor(wish(checkpoint, plan_ahead="on"), lambda s, own: with_graphs(s, own, recorder))
    ) as ahead:
        answers = {name: Answer() for name in (*some, *mixed_requests)}
        ahead.add(some)
        for _ in range(4):
            ahead.step(answers)
        assert ahead.deepest == 2
        ahead.add(mixed_requests)
        while not ahead.scheduler.idle:
            ahead.step(answers)
    assert answers == expected | {name: plainly[name] for name in some}


def test_without_graphs_it_is_off_unless_wished(checkpoint: Path) -> None:
    with session(LocalExecutor(wish(checkpoint, plan_ahead="graphs"))) as running:
        assert not running.limits.plan_ahead and running.executor.depth == 1
        running.generate({"a": ((1, 2), SamplingParams(max_tokens=3, temperature=0.0))})
        assert running.deepest == 1
