"""Steps with drafts at fixed sizes, recorded and replayed by a stand-in: bits of steps laid out anew for each plan."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from msgspec.structs import replace as changed

from rocm_serve.config.graphs import batch_sizes, verified_sizes
from rocm_serve.errors import UserError
from rocm_serve.executor import step_rows
from rocm_serve.executor.draft_inputs import Fields, blank
from rocm_serve.executor.draft_steps import DraftSteps, accepted_by
from rocm_serve.executor.loaded_stage import LoadedStage
from rocm_serve.executor.loading import load_stage_model
from rocm_serve.executor.runner import StageRunner
from rocm_serve.executor.sample_rows import SamplingFailed
from rocm_serve.messages import NewRequest, Plan, StepResult, Work
from rocm_serve.models.qwen3_5.backbone import DRAFT_CACHE_KEY
from rocm_serve.parallel.comm import SoloComm
from rocm_serve.parallel.mesh import Mesh
from rocm_serve.types import SamplingParams
from tests.executor.generate import Requests, Session, session
from tests.executor.recorded_drafts import RecordedDrafts, plans_with_drafts, with_graphs
from tests.executor.simulated import SimulatedExecutor
from tests.executor.test_speculative import TRAINED, Cell, prompts, requests_of, wish_of

MOST = 5  # of the eight requests that run at a time: larger batches are not captured
ONE = Cell(1, 1, 1, 64, False, 3, True)


def wish(cell: Cell, drafts: int | None = None) -> Any:
    return changed(wish_of(cell, TRAINED, cell.drafts if drafts is None else drafts), graph_max_batch=MOST)


def plain_requests(apart: int) -> Requests:
    """Greedy and drawn ones that end so many steps apart: batches shrink from eight to one."""
    found = {}
    for i, prompt in enumerate(prompts(8)):
        params = SamplingParams(max_tokens=6 + apart * i, temperature=0.6 * (i % 3 == 1), seed=i)
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
        pytest.param(Cell(1, 1, 1, 16, False, 1, True), marks=pytest.mark.by_hand),
        Cell(2, 1, 1, 64, False, 3, True, pages=160),
        Cell(1, 2, 2, 64, False, 2, True),
        pytest.param(Cell(2, 2, 1, 64, False, 4, True), marks=pytest.mark.by_hand),
    ],
    ids=lambda cell: cell.name,
)
def test_steps_come_to_what_steps_laid_out_anew_come_to(cell: Cell) -> None:
    """To the bit, drafts too. Garbage lies in all static memory that a step has not written; pages run out in one."""
    recorders = [RecordedDrafts() for _ in range(cell.tp * cell.pp)]

    def graphs(part: LoadedStage, own: StageRunner) -> StageRunner:
        return with_graphs(part, own, recorders[part.coord.rank], poisoned=True)

    requests = {**requests_of(prompts(8)), **plain_requests(apart=5 if cell.pages else 3)}
    expected, _ = served(wish(cell), requests, lambda _, own: own)
    found, running = served(wish(cell), requests, graphs)
    assert found == expected
    assert running.stats.accepted_draft_tokens > 50
    assert cell.pages is None or running.stats.preemptions > 0
    replayed = recorders[-1].sizes
    verified = {size * (1 + cell.drafts) for size in verified_sizes(MOST, cell.drafts)} & set(replayed)
    assert len(verified) >= 2 and set(replayed) & {1, 2, 4, 5}, f"rows replayed: {replayed}"


@pytest.fixture(scope="module")
def stage() -> LoadedStage:
    return load_stage_model(wish(ONE), Mesh(1, 1).coord(0), SoloComm())


def runner_of(stage: LoadedStage, recorder: RecordedDrafts, slots: int = 8) -> StageRunner:
    return with_graphs(stage, stage.runner(num_pages=64, num_slots=slots), recorder, poisoned=True)


def test_a_step_leaves_the_pages_and_states_of_one_laid_out_anew_and_no_trace_in_any_other(stage: LoadedStage) -> None:
    """Batches padded and not; only the dummy slot and the pages of nobody may differ, and of those no page does."""
    recorder = RecordedDrafts()
    plain, graphs = stage.runner(num_pages=64, num_slots=8), runner_of(stage, recorder)
    for runner in (plain, graphs):
        for pages in (*runner.cache.k_pages.values(), *runner.cache.v_pages.values()):
            pages.fill_(0.25)
    for count in (3, 5, 1):
        for plan in plans_with_drafts(count, 3, 7):
            assert plain.step(plan, None) == graphs.step(plan, None)
            for name in ("k_pages", "v_pages", "conv", "ssm"):
                own, other = getattr(plain.cache, name), getattr(graphs.cache, name)
                first = 1 if name in ("conv", "ssm") else 0
                assert all(torch.equal(own[key][first:], other[key][first:]) for key in own), f"{name} after {plan}"
    assert recorder.sizes == [x for size in (4, 5, 1) for x in (4 * size, 7 * size) * 6]


@pytest.mark.parametrize(
    "work",
    [
        (Work(1, 0, 1, False, True, 1, proposals=3),),  # a prompt
        (Work(1, 3, 2, True, True, 1, drafts=(4,)), Work(2, 0, 1, False, True, 2)),  # a prompt beside it
        (Work(1, 3, 2, True, True, 1),),  # two known rows: a preempted request's
        (Work(1, 3, 1, True, False, 1),),  # a row that draws nothing: a preempted request's
        tuple(Work(rid, 3, 2, True, True, rid, drafts=(4,)) for rid in range(1, MOST + 2)),
        tuple(Work(rid, 3, 1, True, True, rid) for rid in range(1, MOST + 2)),
    ],
)
def test_other_steps_are_not_taken(stage: LoadedStage, work: tuple[Work, ...]) -> None:
    steps = runner_of(stage, RecordedDrafts()).decode
    assert steps is not None
    assert not steps.takes(Plan(0, work))
    assert steps.takes(Plan(0, (Work(1, 3, 1, True, True, 1), Work(2, 3, 3, True, True, 2, drafts=(4, 5)))))


def test_plain_steps_have_graphs_of_their_own_and_the_draft_layer_sees_their_rows(stage: LoadedStage) -> None:
    """A row a request, and no draft drawn."""
    recorder = RecordedDrafts()
    plain, graphs = stage.runner(num_pages=64, num_slots=8), runner_of(stage, recorder)
    params = SamplingParams(max_tokens=9, temperature=0.0)
    new = tuple(NewRequest(rid, (5, rid), params) for rid in (1, 2, 3))
    plans = [Plan(0, tuple(Work(rid, 0, 2, False, True, rid, (rid,)) for rid in (1, 2, 3)), new)]
    plans += [
        Plan(i, tuple(Work(rid, 1 + i, 1, True, True, rid, tokens=(9 + i,)) for rid in (1, 2, 3))) for i in (1, 2)
    ]
    for plan in plans:
        assert plain.step(plan, None) == graphs.step(plan, None)
    assert recorder.sizes == [4, 4, 4, 4]
    for name in ("k_pages", "v_pages"):
        own, other = getattr(plain.cache, name)[DRAFT_CACHE_KEY], getattr(graphs.cache, name)[DRAFT_CACHE_KEY]
        assert torch.equal(own[1:4, :4], other[1:4, :4]) and own[1:4, :4].any(-1).all()


def test_replays_can_be_turned_off(stage: LoadedStage) -> None:
    recorder = RecordedDrafts()
    plans = plans_with_drafts(3, 3, 4)
    runner, eager = runner_of(stage, recorder), runner_of(stage, recorder)
    assert eager.decode is not None
    eager.decode.replays = False
    assert [runner.step(plan, None) for plan in plans] == [eager.step(plan, None) for plan in plans]
    assert recorder.sizes == [16, 28] * 3


def test_the_device_counts_drafts_up_to_the_first_wrong_one_of_their_own_request() -> None:
    """Of four requests: two right; wrong, then right; none, before a row that begins with what it drew; padding."""
    fields = blank(4, 3, 1)
    fields.row_starts_B1[:] = 0, 4, 7, 8, 8
    fields.token_ids_T[:8] = 50, 5, 6, 7, 60, 8, 9, 30
    drawn = torch.tensor([5, 6, 1, 7, 2, 9, 30, 0] + [0] * 8)
    found = accepted_by(drawn, Fields(*(torch.from_numpy(array) for array in fields)), 3)
    assert found.tolist() == [2, 0, 0, 0]


@pytest.mark.parametrize(("planted", "told"), [("model", r"row 0 \(token 2 of"), ("mtp", r"row 1 \(token 3 of")])
def test_logits_that_are_not_finite_end_the_step(stage: LoadedStage, planted: str, told: str) -> None:
    """The model's row at position 1, or the draft layer's first one behind two tokens that came of it."""
    runner = runner_of(stage, RecordedDrafts())
    assert runner.decode is not None
    runner.decode.replays = False
    part = stage.model if planted == "model" else stage.model.mtp
    assert part is not None
    first, second, *_ = plans_with_drafts(1, 3, 3)
    result = runner.step(first, None)
    assert isinstance(result, StepResult)
    (own,) = second.work
    work = changed(own, num_rows=1, drafts=(), proposals=2)
    logits = part.logits
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(part, "logits", lambda rows: logits(rows) * float("nan"))
        with pytest.raises(SamplingFailed, match=f"not finite .*: .*{told} its sequence"):
            runner.step(Plan(1, (work,)), None)


class Refusing(RecordedDrafts):
    def record(self, run):  # type: ignore[no-untyped-def]
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore")


def test_a_device_that_refuses_is_named_with_the_way_out(stage: LoadedStage) -> None:
    told = r"of 5 requests with 3 drafts cannot be captured .*capturing; --graph-max-batch 0 serves"
    with pytest.raises(UserError, match=told):
        runner_of(stage, Refusing())


def test_news_of_what_was_captured_goes_to_the_report(stage: LoadedStage) -> None:
    plain = stage.runner(num_pages=64, num_slots=8)
    steps = stage.draft_steps(plain.cache, plain.table, plain.sampler, 8, RecordedDrafts())
    moved: list[int] = []
    ready = stage.capture(replace(plain, decode=steps), lambda: moved.append(1))
    assert ready.graph_max_batch == MOST
    assert ready.graphs.startswith("captured in ") and ready.graphs.endswith("; with drafts up to 5")
    assert len(moved) == len(batch_sizes(MOST)) + len(verified_sizes(MOST, 3))


def test_steps_of_every_size_have_run_where_no_graphs_are_wished_for(
    stage: LoadedStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = replace(stage, resolved=changed(stage.resolved, graph_max_batch=0))
    plain = part.runner(num_pages=64, num_slots=8)
    steps = part.draft_steps(plain.cache, plain.table, plain.sampler, 8, RecordedDrafts())
    ran: list[tuple[int, int]] = []
    draft = DraftSteps._draft
    monkeypatch.setattr(
        DraftSteps, "_draft", lambda own, at, left: ran.append((at.ahead, at.size)) or draft(own, at, left)
    )
    moved: list[int] = []
    assert part.capture(replace(plain, decode=steps), lambda: moved.append(1)).graph_max_batch == 0
    kinds = {0: batch_sizes(8), 3: verified_sizes(8, 3)}
    assert set(ran) == {(ahead, size) for ahead, sizes in kinds.items() for size in sizes}
    assert len(moved) == len(ran)


def test_a_request_with_all_pages_that_a_request_can_have_fits_the_inputs() -> None:
    """One request of 63 pages: what is uploaded ends at a multiple of 16 bytes, behind the page table."""
    long = load_stage_model(changed(wish(ONE), max_model_len=1000), Mesh(1, 1).coord(0), SoloComm())
    runner = runner_of(long, RecordedDrafts(), slots=1)
    first, second, *_ = plans_with_drafts(1, 3, 3)
    runner.step(changed(first, work=(changed(first.work[0], new_pages=tuple(range(63))),)), None)
    result = runner.step(second, None)
    assert isinstance(result, StepResult) and len(result.sampled) == 1


def test_a_second_stage_reads_the_rows_that_came_and_no_older_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of the residual stream are not padded here, as on a GPU: those beyond the batch are left over, or NaN."""
    part = load_stage_model(wish(Cell(2, 1, 1, 64, False, 3, True)), Mesh(1, 2).coord(1), SoloComm())
    monkeypatch.setattr(step_rows, "row_multiple", lambda resolved: 1)

    def results(poisoned: bool) -> list[object]:
        plain = part.runner(num_pages=64, num_slots=8)
        runner = with_graphs(part, plain, RecordedDrafts(), poisoned=poisoned)
        g = torch.Generator().manual_seed(3)
        found = []
        for plan in plans_with_drafts(3, 3, 6):
            rows = torch.randn(sum(work.num_rows for work in plan.work), part.facts.hidden_size, generator=g)
            found.append(runner.step(plan, rows if plan.work else None))
        return found

    assert results(poisoned=True) == results(poisoned=False)
