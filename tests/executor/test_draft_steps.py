"""Steps with drafts at fixed sizes, recorded and replayed by a stand-in: bits of steps laid out anew for each plan."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace as changed

from rocm_serve.config.graphs import verified_sizes
from rocm_serve.executor.loading import LoadedStage
from rocm_serve.executor.runner import StageRunner
from rocm_serve.messages import StepResult
from rocm_serve.types import SamplingParams
from tests.executor.generate import Requests, Session, session
from tests.executor.recorded_drafts import RecordedDrafts, with_graphs
from tests.executor.simulated import SimulatedExecutor
from tests.executor.test_speculative import TRAINED, Cell, prompts, requests_of, wish_of

MOST = 5  # of the eight requests that run at a time: larger batches are not captured
ONE = Cell(1, 1, 1, 64, False, 3, True)


def wish(cell: Cell, drafts: int | None = None) -> Any:
    return changed(wish_of(cell, TRAINED, cell.drafts if drafts is None else drafts), graph_max_batch=MOST)


def plain_requests() -> Requests:
    """Greedy and drawn ones that end one after the other: batches shrink from eight to one."""
    found = {}
    for i, prompt in enumerate(prompts(8)):
        params = SamplingParams(max_tokens=6 + 5 * i, temperature=0.6 * (i % 3 == 1), seed=i)
        found[f"plain {i}"] = prompt[-(5 + 9 * i) :], params
    return found


Runners = Callable[[LoadedStage, StageRunner], StageRunner]


def served(wished: Any, requests: Requests, runners: Runners) -> tuple[list[StepResult], Session]:
    """Serve requests, now and then with some plans that do not draft; return what each step came to."""
    results: list[StepResult] = []
    draw = random.Random(7)
    ways = (way for _ in range(1000) for way in (True,) * draw.randrange(4, 12) + (False,) * draw.randrange(1, 6))
    executor = SimulatedExecutor(wished, runners)
    with session(executor) as running:
        schedule, poll = running.scheduler.schedule, executor.poll

        def poll_and_note(timeout_s: float) -> StepResult | None:
            result = poll(timeout_s)
            assert result is not None
            results.append(result)
            return result

        running.scheduler.schedule = lambda: schedule(drafting=next(ways))  # type: ignore[method-assign]
        executor.poll = poll_and_note  # type: ignore[method-assign,assignment]
        running.generate(requests)
        return results, running


@pytest.mark.parametrize(
    "cell",
    [
        ONE,
        Cell(1, 1, 1, 16, False, 1, True),
        Cell(2, 1, 1, 64, False, 3, True, pages=160),
        Cell(1, 2, 2, 64, False, 2, True),
        Cell(2, 2, 1, 64, False, 4, True),
    ],
    ids=lambda cell: cell.name,
)
def test_steps_come_to_what_steps_laid_out_anew_come_to(cell: Cell) -> None:
    """To the bit, drafts too. Garbage lies in all static memory that a step has not written; pages run out in one."""
    recorders = [RecordedDrafts() for _ in range(cell.tp * cell.pp)]

    def graphs(part: LoadedStage, own: StageRunner) -> StageRunner:
        return with_graphs(part, own, recorders[part.coord.rank], poisoned=True)

    requests = {**requests_of(prompts(8)), **plain_requests()}
    expected, _ = served(wish(cell), requests, lambda _, own: own)
    found, running = served(wish(cell), requests, graphs)
    assert found == expected
    assert running.stats.accepted_draft_tokens > 50
    assert cell.pages is None or running.stats.preemptions > 0
    replayed = recorders[-1].sizes
    verified = {size * (1 + cell.drafts) for size in verified_sizes(MOST, cell.drafts)} & set(replayed)
    assert len(verified) >= 2 and set(replayed) & {1, 2, 4, 5}, f"rows replayed: {replayed}"
