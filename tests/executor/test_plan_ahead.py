"""Steps that run before the tokens of those before them are known: the same tokens, to the bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from rocm_serve.config.schema import Resolved
from rocm_serve.executor.launched import Fetch, Fetched, Launched
from rocm_serve.executor.limits import effective_limits
from rocm_serve.executor.limits import with_graphs as limits_with_graphs
from rocm_serve.executor.loaded_stage import LoadedStage
from rocm_serve.executor.loading import load_stage_model
from rocm_serve.executor.local import LocalExecutor
from rocm_serve.executor.runner import StageRunner
from rocm_serve.messages import Plan, WorkerLoaded, WorkerReady
from rocm_serve.parallel.comm import ThreadComm, run_ranks
from rocm_serve.parallel.mesh import Mesh
from rocm_serve.types import FinishReason, SamplingParams
from tests.executor.generate import Answer, Requests, Session, session
from tests.executor.recorded import Recorded, with_graphs
from tests.executor.simulated import SentTokens, SimulatedExecutor
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
    assert ahead.limits.plan_ahead and ahead.deepest == ahead.executor.depth, "nothing was planned ahead"
    for name, answer in answers.items():
        whole = plainly[name].tokens
        if name in ends:
            assert answer.tokens == whole[: whole.index(ends[name]) + 1] and answer.finish_reason is FinishReason.STOP
        else:
            assert answer == plainly[name]
    assert ahead.stats.pages_used == ahead.stats.slots_used == 0


@pytest.mark.parametrize(
    ("tp", "pp", "graphs", "tight"),
    [
        *((1, 1, False, False), (2, 1, True, False), (1, 1, True, True), (2, 1, False, True)),
        *((1, 2, True, False), (2, 2, False, False), (1, 2, False, True), (2, 2, True, True)),
    ],
)
def test_tokens_are_those_of_steps_one_after_the_other(
    checkpoint: Path, plainly: dict[str, Answer], ends: dict[str, int], tp: int, pp: int, graphs: bool, tight: bool
) -> None:
    """Two shards of the vocabulary draw the same here too: no two best logits of these requests are close."""
    recorder, room = Recorded(), TIGHT if tight else {}

    def changed(part: LoadedStage, own: StageRunner) -> StageRunner:
        return with_graphs(part, own, recorder, poisoned=not room) if graphs else own

    with session(SimulatedExecutor(wish(checkpoint, tp=tp, pp=pp, plan_ahead="on", **room), changed)) as ahead:
        judge(ahead, plainly, ends)
        assert bool(ahead.stats.preemptions) == bool(room) and bool(recorder.sizes) == graphs
        judge(ahead, plainly, ends)  # slots and pages have had other owners


def test_in_one_process_too(checkpoint: Path, plainly: dict[str, Answer], ends: dict[str, int]) -> None:
    with session(LocalExecutor(wish(checkpoint, plan_ahead="on"))) as ahead:
        assert ahead.limits.plan_ahead and ahead.executor.depth == 2
        judge(ahead, plainly, ends)


class TooLate(SentTokens):
    """Hands over the message before the one that is due."""

    def wait(self) -> torch.Tensor:
        due = super().wait()
        late, self.last = getattr(self, "last", due), due
        return late if late.shape == due.shape else due


class TooFew(SentTokens):
    """Leaves the newest message that a step reads for the next one."""

    def bring(self, plan: Plan) -> None:
        super().bring(msgspec.structs.replace(plan, reads=plan.reads - 1))


@pytest.mark.parametrize("fault", [TooLate, TooFew])
def test_tokens_that_come_a_step_late_are_seen(
    checkpoint: Path, plainly: dict[str, Answer], fault: type[SentTokens]
) -> None:
    class Faulty(SimulatedExecutor):
        def _newest(self, first: StageRunner) -> SentTokens:
            return fault(first, self.depth)

    some = {name: requests({})[name] for name in ("r2", "r3")}
    with session(Faulty(wish(checkpoint, pp=2, plan_ahead="on"))) as ahead:
        answers = ahead.generate(some)
    assert all(answers[name] != plainly[name] for name in some)


def test_of_32_requests_at_once_on_two_stages_those_that_go_on_keep_their_tokens(checkpoint: Path) -> None:
    """Some are aborted with rows under way, one has a prompt of three chunks."""
    many = {
        f"m{i}": (
            tuple(40 + 11 * i + j for j in range(150 if i == 31 else 1 + i % 3)),
            SamplingParams(max_tokens=6 + i % 3, temperature=0.8 * (i % 2), seed=i),
        )
        for i in range(32)
    }
    gone = {name for i, name in enumerate(many) if i % 6 == 4}
    with session(SimulatedExecutor(wish(checkpoint, max_running_requests=32))) as plain:
        expected = plain.generate({name: asked for name, asked in many.items() if name not in gone})
    with session(SimulatedExecutor(wish(checkpoint, pp=2, plan_ahead="on", max_running_requests=32))) as ahead:
        answers = {name: Answer() for name in many}
        ahead.add(many)
        while not all(answers[name].tokens for name in gone):
            ahead.step(answers)
        ahead.scheduler.abort(gone)
        assert any(work.pending for record in ahead.scheduler.in_flight for work in record.plan.work)
        while not ahead.scheduler.idle:
            ahead.step(answers)
        assert (ahead.stats.peak_running, ahead.stats.aborted) == (32, len(gone))
        assert ahead.stats.pages_used == ahead.stats.slots_used == 0
    assert {name: answers[name] for name in expected} == expected


@pytest.mark.parametrize("pp", [1, 2])
def test_requests_that_need_the_host_run_beside_others(
    checkpoint: Path, plainly: dict[str, Answer], mixed_requests: Requests, pp: int
) -> None:
    """Penalties and log-probs: the steps that name them have nothing behind them, those before and after do."""
    some = {name: requests({})[name] for name in ("r3", "r5")}
    with session(SimulatedExecutor(wish(checkpoint))) as plain:
        expected = plain.generate(mixed_requests)
    recorder = Recorded()
    with session(
        SimulatedExecutor(wish(checkpoint, pp=pp, plan_ahead="on"), lambda s, own: with_graphs(s, own, recorder))
    ) as ahead:
        answers = {name: Answer() for name in (*some, *mixed_requests)}
        ahead.add(some)
        for _ in range(4):
            ahead.step(answers)
        assert ahead.deepest == pp + 1
        ahead.add(mixed_requests)
        while not ahead.scheduler.idle:
            ahead.step(answers)
    assert answers == expected | {name: plainly[name] for name in some}


class Event:
    """Of a device."""

    def __init__(self) -> None:
        self.passed = False

    def record(self) -> None: ...

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        self.passed = True


class Marking(Fetch):
    """Notes how far behind the marks are that steps ask for."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.marks: list[int] = []

    def mark(self, behind: int) -> Fetched | None:
        self.marks.append(behind)
        return super().mark(behind)


def test_a_mark_is_there_when_the_device_has_passed_it_or_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Event] = []
    monkeypatch.setattr(torch.cuda, "Event", lambda: events.append(Event()) or events[-1])
    fetch = Fetch(torch.device("cuda"))
    assert fetch.mark(behind=1) is None, "nothing is before it"
    own, before = fetch.mark(behind=0), fetch.mark(behind=1)
    assert own is not None and before is not None and not own.there and not before.there
    events[0].passed = events[2].passed = True
    assert not own.there and not before.there
    Launched(7, tuple, before).result()
    assert events[1].passed and own.there, "waited for"


@pytest.mark.parametrize(("how", "behind"), [("off", 1), ("on", 0)])
def test_prompt_steps_that_draw_nothing_are_not_over_before_they_have_run(
    checkpoint: Path, how: str, behind: int
) -> None:
    """Up to one of them, where nothing is planned ahead: the next one is planned while it runs."""
    fetch = Marking()
    with session(
        SimulatedExecutor(wish(checkpoint, plan_ahead=how), lambda stage, own: replace(own, fetch=fetch))
    ) as running:
        fetch.marks.clear()
        running.generate({"a": (tuple(range(150)), SamplingParams(max_tokens=2, temperature=0.0))})
    assert fetch.marks == [behind, behind]


def test_without_graphs_it_is_off_unless_wished(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompt steps that draw nothing then wait for the one before, as where it is off."""
    marks: list[int] = []
    monkeypatch.setattr(Fetch, "mark", lambda self, behind: marks.append(behind))
    with session(LocalExecutor(wish(checkpoint, plan_ahead="graphs"))) as running:
        assert not running.limits.plan_ahead and running.executor.depth == 1
        marks.clear()
        running.generate({"a": (tuple(range(150)), SamplingParams(max_tokens=3, temperature=0.0))})
        assert running.deepest == 1 and marks == [1, 1]


@pytest.mark.parametrize(
    ("how", "captured", "ahead"),
    [("graphs", (8, 16), True), ("graphs", (8, 0), False), ("on", (8, 0), True), ("off", (8, 8), False)],
)
def test_ranks_agree_on_what_their_captures_come_to(
    checkpoint: Path, how: str, captured: tuple[int, int], ahead: bool
) -> None:
    def rank(comm: ThreadComm) -> bool:
        stage = load_stage_model(wish(checkpoint, tp=2, plan_ahead=how), Mesh(2, 1).coord(comm.rank), comm)
        runner = stage.runner(num_pages=4, num_slots=1)
        return stage.after_capture(runner, WorkerReady(comm.rank, captured[comm.rank])).ahead

    assert run_ranks(2, rank) == [ahead, ahead]
    limits = effective_limits(
        wish(checkpoint, tp=2, plan_ahead=how), [WorkerLoaded(n, 0, 1 << 30, 1, 1) for n in (0, 1)]
    )
    found = limits_with_graphs(limits, [WorkerReady(n, most) for n, most in enumerate(captured)], how)
    assert found.plan_ahead == ahead, "the core says the same"
