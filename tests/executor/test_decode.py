"""Decode steps of fixed sizes, recorded and replayed by a stand-in: bits of plain steps, whatever lies in padding."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace as changed

from rocm_serve.config.graphs import batch_sizes
from rocm_serve.errors import UserError
from rocm_serve.executor.decode import DecodeSteps
from rocm_serve.executor.loaded_stage import LoadedStage
from rocm_serve.executor.loading import load_stage_model
from rocm_serve.executor.runner import StageRunner, warm_up_plans
from rocm_serve.messages import NewRequest, Plan, StepResult, Work
from rocm_serve.parallel.comm import SoloComm
from rocm_serve.parallel.mesh import Mesh
from rocm_serve.types import SamplingParams
from tests.executor.generate import Answer, Requests, session
from tests.executor.recorded import Recorded, poison_inputs, with_graphs
from tests.executor.simulated import SimulatedExecutor
from tests.executor.wishes import resolved

MOST = 5  # of the six requests that run at a time: larger batches are not captured


def requests() -> Requests:
    """Prompts of several lengths and answers of all lengths: batches shrink from six to one. All plain."""
    return {
        str(i): (
            tuple(100 + 7 * i + j for j in range(1 + 5 * i)),
            SamplingParams(max_tokens=2 + i // 2 * 2, temperature=0.8 * (i % 2), seed=i),
        )
        for i in range(6)
    }


def wish(checkpoint: Path, tp: int = 1, pp: int = 1):  # type: ignore[no-untyped-def]
    return resolved(model=str(checkpoint), tp=tp, pp=pp, graph_max_batch=MOST)


@pytest.fixture(scope="module")
def stage(checkpoint: Path) -> LoadedStage:
    return load_stage_model(wish(checkpoint), Mesh(1, 1).coord(0), SoloComm())


def runner_of(stage: LoadedStage, recorder: Recorded, slots: int = 8) -> StageRunner:
    return with_graphs(stage, stage.runner(num_pages=64, num_slots=slots), recorder)


@pytest.fixture(scope="module")
def plainly(checkpoint: Path) -> dict[str, Answer]:
    with session(SimulatedExecutor(wish(checkpoint))) as plain:
        return plain.generate(requests())


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (1, 2), (2, 1)])
def test_tokens_are_those_of_plain_steps(checkpoint: Path, plainly: dict[str, Answer], tp: int, pp: int) -> None:
    """Two shards of the vocabulary draw the same here too: no two best logits of these requests are close."""
    recorders = [Recorded() for _ in range(tp * pp)]

    def changed(part: LoadedStage, own: StageRunner) -> StageRunner:
        return with_graphs(part, own, recorders[part.coord.rank], poisoned=True)

    with session(SimulatedExecutor(wish(checkpoint, tp, pp), changed)) as graphs:
        assert graphs.generate(requests()) == plainly
    last = recorders[-1].sizes
    assert set(last) <= set(batch_sizes(MOST)) and len(set(last)) >= 3, f"replayed sizes: {last}"
    assert all(len(one.sizes) == len(last) for one in recorders), "every rank replays the same steps"


def test_rows_with_edits_filters_and_log_probs_get_theirs(checkpoint: Path, mixed_requests: Requests) -> None:
    """With presence penalties, top_p and log-probs, beside a plain one."""
    some = {name: mixed_requests[name] for name in "bdh"} | {"plain": requests()["3"]}
    with session(SimulatedExecutor(wish(checkpoint))) as plain:
        expected = plain.generate(some)
    recorder = Recorded()
    with session(SimulatedExecutor(wish(checkpoint), lambda s, own: with_graphs(s, own, recorder))) as graphs:
        assert graphs.generate(some) == expected
    assert 4 in recorder.sizes


PARAMS = SamplingParams(max_tokens=50, temperature=0.0)


def admitted(runner: StageRunner, count: int) -> list[int]:
    """Run prompts of one token each, rids and slots from 1 on; return the tokens drawn."""
    rids = range(1, count + 1)
    work = tuple(Work(rid, 0, 1, False, True, rid, (rid,)) for rid in rids)
    result = runner.step(Plan(0, work, tuple(NewRequest(rid, (rid,), PARAMS) for rid in rids)), None)
    assert isinstance(result, StepResult)
    return [one.tokens[0] for one in result.sampled]


def decoded(runner: StageRunner, tokens: list[int], position: int) -> list[int]:
    """Decode one token more of the first len(tokens) requests."""
    work = tuple(Work(rid, position, 1, True, True, rid, tokens=(token,)) for rid, token in enumerate(tokens, start=1))
    result = runner.step(Plan(position, work), None)
    assert isinstance(result, StepResult)
    return [one.tokens[0] for one in result.sampled]


def test_a_batch_is_padded_to_the_next_size_and_a_larger_one_runs_as_it_is(stage: LoadedStage) -> None:
    recorder = Recorded()
    runner = runner_of(stage, recorder)
    tokens = decoded(runner, admitted(runner, MOST + 1), 1)
    assert recorder.sizes == []
    for position, count in enumerate((5, 4, 3, 2, 1), start=2):
        tokens = decoded(runner, tokens[:count], position)
    assert recorder.sizes == [5, 4, 4, 2, 1]


def test_no_batch_is_larger_than_the_slots(stage: LoadedStage) -> None:
    recorder = Recorded()
    runner = runner_of(stage, recorder, slots=3)
    decoded(runner, admitted(runner, 3), 1)
    assert recorder.sizes == [3]


def test_static_memory_stays_where_it_is_and_padding_touches_no_request(stage: LoadedStage) -> None:
    recorder = Recorded()
    runner = runner_of(stage, recorder)
    steps = runner.decode
    assert steps is not None
    tokens = admitted(runner, 4)
    places = [x.data_ptr() for x in (steps._inputs, steps._pages_BP)]
    for position in range(1, 5):
        tokens = decoded(runner, tokens, position)
    kept = {key: pages.clone() for key, pages in runner.cache.k_pages.items()}
    states = {key: state.clone() for key, state in runner.cache.ssm.items()}
    decoded(runner, tokens[:3], 5)  # of a size of four: one row of padding
    assert recorder.sizes == [4, 4, 4, 4, 4]
    assert [x.data_ptr() for x in (steps._inputs, steps._pages_BP)] == places
    for key, pages in runner.cache.k_pages.items():
        changed = (pages != kept[key]).flatten(2).any(-1).nonzero().tolist()
        assert changed == [[1, 5], [2, 5], [3, 5]], "one row of each request's page and nothing else"
    for key, state in runner.cache.ssm.items():
        changed = (state != states[key]).flatten(1).any(-1).nonzero().flatten().tolist()
        assert set(changed) - {0} == {1, 2, 3}, "states of the requests, and maybe the dummy's"


def test_replays_can_be_turned_off(stage: LoadedStage) -> None:
    recorder = Recorded()
    runner = runner_of(stage, recorder)
    tokens = admitted(runner, 3)
    assert runner.decode is not None
    runner.decode.replays = False
    eager = decoded(runner, tokens, 1)
    assert recorder.sizes == []
    again = runner_of(stage, recorder)
    assert admitted(again, 3) == tokens and decoded(again, tokens, 1) == eager and recorder.sizes == [4]


@pytest.mark.parametrize(
    "work",
    [
        (Work(1, 0, 1, False, True, 1),),  # a prompt
        (Work(1, 3, 1, True, True, 1), Work(2, 0, 1, False, True, 2)),  # a prompt beside it
        (Work(1, 3, 2, True, True, 1),),  # two rows: a preempted request's, or a draft
        (Work(1, 3, 1, True, False, 1),),  # a row that draws nothing: a preempted request's
        tuple(Work(rid, 3, 1, True, True, rid) for rid in range(1, MOST + 2)),
    ],
)
def test_other_steps_are_not_taken(stage: LoadedStage, work: tuple[Work, ...]) -> None:
    steps = runner_of(stage, Recorded()).decode
    assert steps is not None
    assert not steps.takes(Plan(0, work))
    assert steps.takes(Plan(0, (Work(1, 3, 1, True, True, 1),)))


class Refusing(Recorded):
    def record(self, run):  # type: ignore[no-untyped-def]
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore")


def test_a_device_that_refuses_is_named_with_the_way_out(stage: LoadedStage) -> None:
    with pytest.raises(UserError, match=r"of 5 requests cannot be captured .*capturing; --graph-max-batch 0 serves"):
        runner_of(stage, Refusing())


def test_news_of_what_was_captured_goes_to_the_report(stage: LoadedStage, caplog: pytest.LogCaptureFixture) -> None:
    plain = stage.runner(num_pages=64, num_slots=8)
    assert plain.decode is None
    ready = stage.capture(plain, lambda: None)
    assert (ready.graph_max_batch, ready.graphs) == (0, "a CPU has no device graphs")
    steps = stage.decode_steps(plain.cache, plain.table, plain.sampler, 8, Recorded())
    moved: list[int] = []
    with caplog.at_level("INFO"):
        ready = stage.capture(replace(plain, decode=steps), lambda: moved.append(1))
    assert ready.graph_max_batch == MOST and ready.graphs.startswith("captured in ")
    assert len(moved) == len(batch_sizes(MOST))
    lines = [line for line in caplog.messages if "captured" in line]
    assert len(lines) == len(moved) + 1 and "rank 0: decode steps of 5 requests captured" in lines[0]


@pytest.mark.parametrize("asked", [0, MOST])
def test_steps_of_every_size_have_run_before_requests_come(
    stage: LoadedStage, monkeypatch: pytest.MonkeyPatch, asked: int
) -> None:
    """Where no graphs are wished for too: what a step compiles would else compile while requests wait."""
    part = replace(stage, resolved=changed(stage.resolved, graph_max_batch=asked))
    plain = part.runner(num_pages=64, num_slots=8)
    steps = part.decode_steps(plain.cache, plain.table, plain.sampler, 8, Recorded())
    ran: list[int] = []
    forward = DecodeSteps._forward
    monkeypatch.setattr(DecodeSteps, "_forward", lambda own, at: ran.append(at.size) or forward(own, at))
    moved: list[int] = []
    ready = part.capture(replace(plain, decode=steps), lambda: moved.append(1))
    sizes = batch_sizes(asked or 8)
    assert ready.graph_max_batch == asked and set(ran) == set(sizes) and len(moved) == len(sizes)


def test_warm_up_and_steps_of_news_alone_go_by_as_before(stage: LoadedStage) -> None:
    runner = runner_of(stage, Recorded())
    for plan in warm_up_plans(16, 256):
        runner.step(plan, None)
    assert runner.step(Plan(0, ()), None) == StepResult(0, ())


def test_a_second_stage_reads_the_rows_that_came_and_no_older_ones(checkpoint: Path) -> None:
    """Rows of the residual stream are not padded here, as on a GPU: those beyond the batch are left over, or NaN."""
    coord = Mesh(1, 2).coord(1)
    part = load_stage_model(wish(checkpoint, pp=2), coord, SoloComm())

    def tokens(poisoned: bool) -> list[tuple[int, ...]]:
        plain = part.runner(num_pages=64, num_slots=8)
        steps = DecodeSteps(
            part.model,
            plain.cache,
            plain.table,
            plain.sampler,
            sizes=(4,),
            captured=(4,),
            recorder=Recorded(),
            max_pages=16,
            hidden_size=part.facts.hidden_size,
            dtype=torch.float32,
            device=torch.device("cpu"),
            row_multiple=1,
        )
        runner = with_graphs_of(plain, steps, poisoned)
        g = torch.Generator().manual_seed(3)
        rids = range(1, 4)
        rows = torch.randn(32, part.facts.hidden_size, generator=g)
        news = tuple(NewRequest(rid, (rid,), PARAMS) for rid in rids)
        runner.step(Plan(0, tuple(Work(rid, 0, 1, False, True, rid, (rid,)) for rid in rids), news), rows)
        result = runner.step(
            Plan(1, tuple(Work(rid, 1, 1, True, True, rid, tokens=(7,)) for rid in rids)),
            torch.randn(3, part.facts.hidden_size, generator=g),
        )
        assert isinstance(result, StepResult)
        return [one.tokens for one in result.sampled]

    assert tokens(poisoned=True) == tokens(poisoned=False)


def with_graphs_of(plain: StageRunner, steps: DecodeSteps, poisoned: bool) -> StageRunner:
    if poisoned:
        poison_inputs(steps)
    steps.capture(lambda size: None)
    return replace(plain, decode=steps)
