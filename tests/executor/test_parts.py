"""Steps with prompts beside requests that draft, or beside many that decode: two steps of fixed size, bits of one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace as changed

from rocm_serve.config import graphs as sizes
from rocm_serve.diagnostics.experts.counts import read_counts
from rocm_serve.executor import runner as runner_module
from rocm_serve.executor.launched import Launched, joined
from rocm_serve.executor.loaded_stage import LoadedStage
from rocm_serve.executor.loading import load_stage_model
from rocm_serve.executor.parts import joined_rows, parts_of
from rocm_serve.executor.runner import StageRunner
from rocm_serve.messages import NewRequest, Plan, Sampled, StepResult, Work
from rocm_serve.parallel.comm import SoloComm
from rocm_serve.parallel.mesh import Mesh
from rocm_serve.types import SamplingParams
from tests.executor import recorded, recorded_drafts
from tests.executor.generate import Answer, Requests, session
from tests.executor.recorded import Recorded
from tests.executor.recorded_drafts import RecordedDrafts, mixed_plans
from tests.executor.simulated import SimulatedExecutor
from tests.executor.test_plan_ahead import requests as short_requests
from tests.executor.test_prompt_steps import DECODES, Again, kept_by, with_prompt_steps
from tests.executor.test_speculative import TRAINED, Cell, prompts, requests_of, wish_of
from tests.executor.wishes import resolved

MOST = 8


class Prompts(Again):
    """`parts`: of steps in two, how many sequences they had."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[tuple[int, int]] = []


@dataclass
class Replayed:
    """Recorders of one rank."""

    decode: Recorded = field(default_factory=Recorded)
    prompts: Prompts = field(default_factory=Prompts)


def fixed(stage: LoadedStage, own: StageRunner, replayed: Replayed, **prompts: Any) -> StageRunner:
    """Return a runner whose steps of both kinds are recorded, over static memory full of garbage."""
    if isinstance(replayed.decode, RecordedDrafts):
        found = recorded_drafts.with_graphs(stage, own, replayed.decode, poisoned=True)
    else:
        found = recorded.with_graphs(stage, own, replayed.decode, poisoned=True)
    assert found.decode is not None
    found.decode.replays = prompts.get("captured", True)
    return with_prompt_steps(stage, found, replayed.prompts, **prompts)


@pytest.fixture(autouse=True)
def note_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step in two must be two that were recorded."""
    plain = StageRunner._in_parts

    def in_parts(runner: StageRunner, plan: Plan, decoded: Plan, prompted: Plan, rows: Any) -> Any:
        assert runner.decode is not None and runner.prompts is not None
        decode, prompts = runner.decode._recorder, runner.prompts._recorder
        assert isinstance(decode, Recorded) and isinstance(prompts, Prompts)
        before = len(decode.sizes), len(prompts.sequences)
        left = plain(runner, plan, decoded, prompted, rows)
        ran = len(decode.sizes) - before[0], len(prompts.sequences) - before[1]
        assert ran == ((1 + (runner.drafter is not None), 1) if runner.decode.replays else (0, 0))
        prompts.parts.append((len(decoded.work), len(prompted.work)))
        return left

    monkeypatch.setattr(StageRunner, "_in_parts", in_parts)


def drafting(drafts: int, pp: int = 1, tp: int = 1) -> Any:
    plain = wish_of(Cell(pp, tp, 1, 32, False, drafts, True), TRAINED, drafts)
    return changed(plain, graph_max_batch=MOST)


def served(
    wished: Any, runners: Callable[[LoadedStage, StageRunner], StageRunner], requests: Requests, gone: tuple[str, ...]
) -> tuple[list[StepResult], dict[str, Answer]]:
    """Serve requests; those `gone` are aborted when they have two tokens. Return what each step came to, too."""
    results: list[StepResult] = []
    executor = SimulatedExecutor(wished, runners)
    with session(executor) as running:
        poll = executor.poll

        def poll_and_note(timeout_s: float) -> StepResult | None:
            result = poll(timeout_s)
            assert result is not None
            results.append(result)
            return result

        executor.poll = poll_and_note  # type: ignore[method-assign,assignment]
        answers, left = {name: Answer() for name in requests}, set(gone)
        running.add(requests)
        while not running.scheduler.idle:
            running.step(answers)
            over = {name for name in left if len(answers[name].tokens) >= 2}
            running.scheduler.abort(over)
            left -= over
        assert not left
    return results, answers


@pytest.mark.parametrize(
    ("drafts", "pp", "tp"), [(1, 1, 1), (3, 2, 1), pytest.param(2, 2, 2, marks=pytest.mark.by_hand)]
)
def test_drafting_beside_prompts_comes_to_what_steps_laid_out_anew_come_to(drafts: int, pp: int, tp: int) -> None:
    """To the bit, drafts too: prompts of several chunks, penalties, log-probs, prompts scored, ends and an abort."""
    every = [Replayed(RecordedDrafts()) for _ in range(pp * tp)]
    asked = {name: requests_of(prompts(8))[name] for name in ("r1", "r2", "r3", "r5", "r6")}
    asked = {
        name: (prompt, changed(params, max_tokens=min(params.max_tokens, 9)))
        for name, (prompt, params) in asked.items()
    }
    wished = drafting(drafts, pp, tp)
    expected = served(wished, lambda _, own: own, asked, ("r2",))
    found = served(wished, lambda part, own: fixed(part, own, every[part.coord.rank]), asked, ("r2",))
    assert found == expected
    assert sum(one.accepted for result in found[0] for one in result.sampled) > 5
    parts = every[0].prompts.parts
    assert len(parts) >= 4 // pp and max(parts)[0] >= 2, parts
    assert all(one.prompts.parts == parts for one in every), "every rank of every stage does the same"


@pytest.fixture(scope="module")
def stages() -> list[LoadedStage]:
    return [load_stage_model(drafting(3, pp=2), Mesh(1, 2).coord(rank), SoloComm()) for rank in (0, 1)]


def compared(stages: list[LoadedStage], *, captured: bool = True) -> list[Replayed]:
    """Run plans on two stages both ways; rows that cross, results, pages and states must be the same."""
    every = [Replayed(RecordedDrafts()) for _ in stages]
    plain = [stage.runner(num_pages=64, num_slots=8) for stage in stages]
    parts = [
        fixed(stage, stage.runner(num_pages=64, num_slots=8), one, captured=captured)
        for stage, one in zip(stages, every, strict=True)
    ]
    for runner in (*plain, *parts):
        for kept in kept_by(runner):
            kept.zero_()
    for plan in mixed_plans():
        rows = sum(work.num_rows for work in plan.work)
        crossed = [first.step(plan, None) for first in (plain[0], parts[0])]
        assert isinstance(crossed[0], torch.Tensor) and isinstance(crossed[1], torch.Tensor)
        assert crossed[0].shape == crossed[1].shape
        assert torch.equal(crossed[0][:rows], crossed[1][:rows]), f"rows of step {plan.seq}"
        given = crossed if plan.work else [None, None]
        assert plain[1].step(plan, given[0]) == parts[1].step(plan, given[1]), f"step {plan.seq}"
        for own, other in zip(plain, parts, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(kept_by(own), kept_by(other), strict=True)), plan.seq
    return every


@pytest.mark.parametrize("captured", [True, False])
def test_rows_pages_and_states_are_those_of_whole_steps(stages: list[LoadedStage], captured: bool) -> None:
    assert all(one.prompts.parts == [(3, 1), (3, 1), (3, 2), (3, 1)] for one in compared(stages, captured=captured))


def exchanged(first_TH: torch.Tensor, count: int, second_TH: torch.Tensor, more: int, rows: int) -> torch.Tensor:
    return joined_rows(second_TH, more, first_TH, count, rows)


def without_drafts(first: Launched, second: Launched) -> Launched:
    drafted = [changed(one, drafts=()) for one in first.result().sampled]
    return joined(Launched(first.seq, lambda: drafted), second)


@pytest.mark.parametrize(
    ("name", "fault", "told"),
    [("joined_rows", exchanged, "rows of step 2"), ("joined", without_drafts, "step 2")],
)
def test_parts_exchanged_and_drafts_lost_are_seen(
    stages: list[LoadedStage], monkeypatch: pytest.MonkeyPatch, name: str, fault: Any, told: str
) -> None:
    monkeypatch.setattr(runner_module, name, fault)
    with pytest.raises(AssertionError, match=told):
        compared(stages)


def prompt(rows: int, rid: int = 90) -> Work:
    return Work(rid, 0, rows, False, True, 8)


DRAFTED = Work(1, 3, 2, True, True, 1, drafts=(4,))


@pytest.mark.parametrize(
    ("works", "count"),
    [
        ((DRAFTED, prompt(64)), 1),
        ((Work(1, 3, 1, True, True, 1, tokens=(1, 2), accepted=1), prompt(5)), 1),
        ((*(Work(rid, 3, 1, True, True, rid) for rid in range(1, 5)), prompt(9), prompt(9, 91)), 4),
        ((*(Work(rid, 3, 1, True, True, rid) for rid in range(1, 4)), prompt(9)), None),  # one size holds it
        ((DRAFTED, prompt(65)), None),
        ((DRAFTED, *(prompt(3, rid) for rid in range(90, 94))), None),
        ((*(Work(rid, 3, 1, True, True, rid) for rid in range(1, MOST + 2)), prompt(9)), None),
        ((Work(1, 3, 2, True, True, 1), prompt(9)), None),  # a preempted request's rows
        ((DRAFTED,), None),
        ((prompt(9),), None),
    ],
)
def test_a_plan_is_in_parts_where_both_have_a_size_and_the_whole_has_none(
    stages: list[LoadedStage], works: tuple[Work, ...], count: int | None
) -> None:
    runner = fixed(stages[0], stages[0].runner(num_pages=64, num_slots=8), Replayed(RecordedDrafts()))
    plan = Plan(4, works, (NewRequest(1, (1,), SamplingParams(max_tokens=1)),), (5,), reads=2)
    parts = parts_of(plan, runner.decode, runner.prompts)
    if count is None:
        assert parts is None
    else:
        assert parts == (Plan(4, works[:count], reads=2), Plan(4, works[count:], reads=2))
    assert parts_of(plan, None, runner.prompts) is None and parts_of(plan, runner.decode, None) is None


@pytest.mark.parametrize("drafts", [False, True])
def test_beside_more_than_a_size_has_room_for_and_up_to_128_that_decode_plans_are_in_parts(
    checkpoint: Path, stages: list[LoadedStage], drafts: bool
) -> None:
    """With graphs and without; not beside more than there is a size for."""
    slots, recorder = 256, RecordedDrafts() if drafts else Recorded()
    plain = ahead(checkpoint, 1, 1, "off", None)
    stage = stages[0] if drafts else load_stage_model(plain, Mesh(1, 1).coord(0), SoloComm())
    own = stage.runner(num_pages=64, num_slots=slots)
    prompts = with_prompt_steps(stage, own, Prompts(), decodes=(0, sizes.PROMPT_DECODES), captured=False).prompts
    found = {}
    for most in (0, 100, 256):
        of_size = replace(stage, resolved=changed(stage.resolved, graph_max_batch=most))
        steps: Any = of_size.draft_steps if drafts else of_size.decode_steps
        decode = steps(own.cache, own.table, own.sampler, slots, recorder)
        for count in (64, 65, 100, 101, 128, 129, 256):
            works = tuple(Work(rid, 3, 1, True, True, rid) for rid in range(1, count + 1))
            parts = parts_of(Plan(4, (*works, prompt(9, 900))), decode, prompts)
            assert parts in (None, (Plan(4, works), Plan(4, (prompt(9, 900),))))
            found[most, count] = parts is not None
    assert [key for key, in_parts in found.items() if in_parts] == [
        *((0, 65), (0, 100), (0, 101), (0, 128)),
        *((100, 65), (100, 100)),
        *((256, 65), (256, 100), (256, 101), (256, 128)),
    ]


def test_what_prompts_have_yet_to_draw_is_launched_before_the_other_part_is_waited_for() -> None:
    finished: list[str] = []

    def finish(name: str, rid: int) -> Callable[[], list[Sampled]]:
        return lambda: finished.append(name) or [Sampled(rid, (7,))]  # type: ignore[func-returns-value]

    both = joined(Launched(4, finish("decoded", 1)), Launched(4, finish("prompts", 2)))
    assert both.result() == StepResult(4, (Sampled(1, (7,)), Sampled(2, (7,)))) and finished == ["prompts", "decoded"]


def ahead(checkpoint: Path, pp: int, tp: int, how: str, counts: str | None) -> Any:
    return resolved(
        model=str(checkpoint),
        pp=pp,
        tp=tp,
        graph_max_batch=MOST,
        plan_ahead=how,
        chunked_prefill_size=32,
        expert_counts=counts,
    )


def longer(mixed_requests: Requests) -> Requests:
    """Greedy, drawn, filtered; then some with penalties and log-probs, and prompts of several chunks that want some."""
    late = {name: mixed_requests[name] for name in "bdf"}
    return {**{name: one for name, one in short_requests({}).items() if name not in ("r1", "r9")}, **late}


@pytest.fixture(scope="module")
def plainly(checkpoint: Path, mixed_requests: Requests) -> dict[str, Answer]:
    with session(SimulatedExecutor(ahead(checkpoint, 1, 1, "off", None))) as plain:
        return plain.generate(longer(mixed_requests))


def answers_of(wished: Any, requests: Requests, beside: tuple[int, ...]) -> tuple[dict[str, Answer], list[Replayed]]:
    """`beside`: sizes of decoding requests beside prompts."""
    every = [Replayed() for _ in range(wished.pp * wished.tp)]
    executor = SimulatedExecutor(wished, lambda part, own: fixed(part, own, every[part.coord.rank], decodes=beside))
    with session(executor) as running:
        answers = running.generate(requests)
        assert running.deepest == wished.pp + (wished.plan_ahead == "on")
    return answers, every


@pytest.mark.parametrize(
    ("pp", "tp", "how", "beside"),
    [
        *((1, 1, "on", DECODES), (2, 1, "on", (0, 1)), (1, 1, "off", (0,))),
        *(pytest.param(pp, 2, "on", (0, 1), marks=pytest.mark.by_hand) for pp in (1, 2)),
    ],
)
def test_many_that_decode_beside_prompts_have_the_tokens_of_plain_steps(
    checkpoint: Path,
    mixed_requests: Requests,
    plainly: dict[str, Answer],
    tmp_path: Path,
    pp: int,
    tp: int,
    how: str,
    beside: tuple[int, ...],
) -> None:
    """More than a size of prompts has room for, with steps planned ahead and not, or any where experts are counted."""
    requests, counted = longer(mixed_requests), str(tmp_path / "c.json") if beside == (0,) else None
    answers, every = answers_of(ahead(checkpoint, pp, tp, how, counted), requests, beside)
    assert {name: one.tokens for name, one in answers.items()} == {name: one.tokens for name, one in plainly.items()}
    assert tp > 1 or answers == plainly
    parts = every[0].prompts.parts
    assert len(parts) >= 4 and min(parts)[0] > beside[-1], parts
    assert all(one.prompts.parts == parts for one in every)
    if counted:
        rows = sum(len(prompt) + params.max_tokens - 1 for prompt, params in requests.values())
        layers = read_counts([Path(counted)]).layers
        assert [layer.tokens for layer in layers.values()] == [rows] * 4, "each row once"


def test_tokens_of_parts_that_go_to_the_first_stage_in_another_order_are_seen(
    checkpoint: Path, mixed_requests: Requests, plainly: dict[str, Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    def turned(first: Launched, second: Launched) -> Launched:
        left = joined(first, second)
        if left.drawn_R3 is not None:
            left.drawn_R3 = left.drawn_R3.flip(0)
        return left

    monkeypatch.setattr(runner_module, "joined", turned)
    answers, _ = answers_of(ahead(checkpoint, 2, 1, "on", None), longer(mixed_requests), (0, 1))
    assert answers != plainly
