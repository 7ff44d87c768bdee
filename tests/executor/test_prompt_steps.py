"""Steps with prompt rows at fixed sizes, recorded and replayed by a stand-in: bits of plain steps, no traces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from rocm_serve.errors import UserError
from rocm_serve.executor.inputs import HostRows
from rocm_serve.executor.loaded_stage import LoadedStage
from rocm_serve.executor.loading import load_stage_model
from rocm_serve.executor.local import LocalExecutor
from rocm_serve.executor.prompt_steps import PromptSteps
from rocm_serve.executor.runner import StageRunner
from rocm_serve.executor.upload import Array, Upload
from rocm_serve.messages import NewRequest, Plan, Work
from rocm_serve.ops.batch import ForwardBatch, Sequences, StageCache
from rocm_serve.ops.tiles_prefill import KEYS_AT_A_TIME
from rocm_serve.parallel.comm import SoloComm
from rocm_serve.parallel.mesh import Mesh
from rocm_serve.types import SamplingParams
from tests.executor.generate import Answer, Requests, session
from tests.executor.simulated import SimulatedExecutor
from tests.executor.wishes import resolved

T = TypeVar("T")
ROWS, DECODES = (32, 64), (0, 3)
PROMPTS = 3


class Again:
    """A recorder without a GPU: a replay runs the recorded step once more.

    `sequences`: of each step that was replayed, how many it has room for.
    """

    def __init__(self) -> None:
        self.sequences: list[int] = []
        self._ran = 0

    def host_copies(self, contexts_B: torch.Tensor, slots_B: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
        raise AssertionError("that is for decode steps")

    def host_copy(self, values: torch.Tensor, bound: tuple[int, ...]) -> tuple[int, ...]:
        found = tuple(values.tolist())
        assert len(found) == len(bound) and all(a <= b for a, b in zip(found, bound, strict=True) if b), (found, bound)
        self._ran = len(found)
        return found

    def record(self, run: Callable[[], T]) -> Callable[[], T]:
        left = run()
        assert isinstance(left, torch.Tensor)

        def replay() -> T:
            out = run()
            assert isinstance(out, torch.Tensor)
            left.fill_(float("nan"))
            left[: len(out)] = out
            self.sequences.append(self._ran)
            return left

        return replay  # type: ignore[return-value]


def with_prompt_steps(
    stage: LoadedStage,
    own: StageRunner,
    recorder: Again,
    *,
    decodes: tuple[int, ...] = DECODES,
    prompts: int = PROMPTS,
    captured: bool = True,
    poisoned: bool = True,
) -> StageRunner:
    steps = PromptSteps(
        stage.model,
        own.cache,
        decodes=decodes,
        rows=ROWS,
        prompts=prompts,
        captured=captured,
        recorder=recorder,
        max_model_len=stage.resolved.max_model_len,
        hidden_size=None if stage.coord.first_stage else stage.facts.hidden_size,
        dtype=stage.dtype,
        device=stage.device,
        row_multiple=own.row_multiple,
    )
    assert steps.capture(lambda rows: None) == (ROWS[-1] if captured else 0)
    if poisoned:
        poison(steps)
    return replace(own, prompts=steps)


def poison(steps: PromptSteps) -> None:
    """From now on, whatever a step does not write to its static inputs is garbage when it runs."""
    plain = steps.takes

    def takes(plan: Plan) -> bool:
        steps._inputs.fill_(0x3F)
        steps._pages_BP.fill_(1 << 30)
        if steps._hidden_TH is not None:
            steps._hidden_TH.fill_(float("nan"))
        return plain(plan)

    steps.takes = takes  # type: ignore[method-assign]


def requests() -> Requests:
    """Prompts of less than a size, of exactly one and of several chunks, with answers that run on beside them."""
    lengths = (1, 31, 64, 65, 150, 7)
    return {
        str(i): (
            tuple((3 + 11 * i + 5 * j) % 200 for j in range(length)),
            SamplingParams(
                max_tokens=3 + 4 * i,
                temperature=0.8 * (i % 2),
                seed=i,
                logprobs=1 if i == 3 else None,
                prompt_logprobs=0 if i == 4 else None,
            ),
        )
        for i, length in enumerate(lengths)
    }


def wish(checkpoint: Path, tp: int = 1, pp: int = 1):  # type: ignore[no-untyped-def]
    return resolved(model=str(checkpoint), tp=tp, pp=pp, chunked_prefill_size=64, max_running_requests=4)


@pytest.fixture(scope="module")
def plainly(checkpoint: Path) -> dict[str, Answer]:
    with session(SimulatedExecutor(wish(checkpoint))) as plain:
        return plain.generate(requests())


@pytest.mark.parametrize(("tp", "pp", "prompts"), [(1, 1, PROMPTS), (1, 2, 1), (2, 1, PROMPTS)])
def test_tokens_and_log_probs_are_those_of_plain_steps(
    checkpoint: Path, plainly: dict[str, Answer], tp: int, pp: int, prompts: int
) -> None:
    """Two shards of the vocabulary draw the same here too: no two best logits of these requests are close."""
    recorders = [Again() for _ in range(tp * pp)]

    def changed(stage: LoadedStage, own: StageRunner) -> StageRunner:
        return with_prompt_steps(stage, own, recorders[stage.coord.rank], prompts=prompts)

    with session(SimulatedExecutor(wish(checkpoint, tp, pp), changed)) as fixed:
        found = fixed.generate(requests())
    if tp == 1:
        assert found == plainly
    assert {name: one.tokens for name, one in found.items()} == {name: one.tokens for name, one in plainly.items()}
    steps = recorders[0].sequences
    assert {1 + DECODES[-1], prompts + DECODES[-1]} <= set(steps) and len(steps) >= 5
    assert all(one.sequences == steps for one in recorders), "every rank replays the same steps"


def test_bits_are_the_same_with_graphs_and_without(checkpoint: Path, plainly: dict[str, Answer]) -> None:
    recorder = Again()
    with session(
        SimulatedExecutor(wish(checkpoint), lambda s, own: with_prompt_steps(s, own, recorder, captured=False))
    ) as fixed:
        assert fixed.generate(requests()) == plainly
    assert not recorder.sequences


def test_before_requests_come_each_size_has_run_and_so_have_steps_that_no_size_holds(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without graphs, too, all kernels are compiled then: the first prompt of the start runs as it comes."""
    ran: list[tuple[int, int, int]] = []
    own, forward = LoadedStage.runner, PromptSteps._forward

    def counted(steps: PromptSteps, at: Any) -> torch.Tensor:
        ran.append((at.decodes, at.prompts, at.rows))
        return forward(steps, at)

    def runner(stage: LoadedStage, **room: int) -> StageRunner:
        made = with_prompt_steps(stage, own(stage, **room), Again(), captured=False)
        ran.clear()
        return made

    monkeypatch.setattr(PromptSteps, "_forward", counted)
    monkeypatch.setattr(LoadedStage, "runner", runner)
    with session(LocalExecutor(wish(checkpoint))) as local:
        kinds = [(d, 1) for d in DECODES] + [(DECODES[-1], PROMPTS)]
        assert sorted(ran) == sorted((*kind, rows) for kind in kinds for rows in ROWS)
        ran.clear()
        local.generate({name: one for name, one in requests().items() if name in "45"})
    assert {prompts for _, prompts, _ in ran} == {1, PROMPTS}, "22 rows of a prompt of 150, then 7 of the next"


def test_padding_leaves_no_trace_in_pages_and_states(checkpoint: Path) -> None:
    """One request decodes beside ten rows of a prompt, then beside its next 40: two rows and three sequences too many.

    Two prompts then share a step, where there is room for three. The rows that poisoned padding points to are those of
    the first prompt.
    """
    stage = load_stage_model(wish(checkpoint), Mesh(1, 1).coord(0), SoloComm())
    plain = stage.runner(num_pages=32, num_slots=4)
    recorder = Again()
    fixed = with_prompt_steps(stage, stage.runner(num_pages=32, num_slots=4), recorder)
    params = SamplingParams(max_tokens=9, temperature=0.0)
    first = NewRequest(1, tuple(range(5, 12)), params)
    second = NewRequest(2, tuple(range(40, 100)), params)
    plans = (
        Plan(0, (Work(1, 0, 7, False, True, 1, (0, 1)),), (first,)),
        Plan(
            1, (Work(1, 7, 1, True, True, 1, tokens=(9,)), Work(2, 0, 10, False, False, 2, (2, 3, 4, 5, 6))), (second,)
        ),
        Plan(2, (Work(1, 8, 1, True, True, 1, tokens=(11,)), Work(2, 10, 40, False, False, 2))),
        Plan(3, (Work(2, 50, 10, False, True, 2),)),
        Plan(
            4,
            (
                Work(1, 9, 1, True, True, 1, tokens=(12,)),
                Work(3, 0, 9, False, True, 3, (9,)),
                Work(4, 0, 21, False, False, 4, (11, 8)),
            ),
            (NewRequest(3, tuple(range(9)), params), NewRequest(4, tuple(range(50, 80)), params)),
        ),
        Plan(5, (Work(3, 9, 1, True, True, 3, tokens=(5,)), Work(4, 21, 9, False, True, 4))),
    )
    for runner in (plain, fixed):
        for kept in kept_by(runner):
            kept.zero_()
    for plan in plans:
        assert fixed.step(plan, None) == plain.step(plan, None)
        assert all(torch.equal(a, b) for a, b in zip(kept_by(fixed), kept_by(plain), strict=True)), f"step {plan.seq}"
    assert recorder.sequences == [1, 4, 4, 1, DECODES[-1] + PROMPTS, 4]


def kept_by(runner: StageRunner) -> list[torch.Tensor]:
    """Return everything that is kept between steps, but for the dummy slot."""
    cache = runner.cache
    pages = [*cache.k_pages.values(), *cache.v_pages.values()]
    return pages + [states[1:] for states in (*cache.conv.values(), *cache.ssm.values())]


def test_a_capture_that_fails_ends_the_start_with_the_way_out(checkpoint: Path) -> None:
    class Refusing(Again):
        def record(self, run: Callable[[], T]) -> Callable[[], T]:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")

    with pytest.raises(UserError, match="steps of 64 prompt rows cannot be captured .* permitted when stream is"):
        stage_with(checkpoint, Refusing())


def stage_with(checkpoint: Path, recorder: Again) -> StageRunner:
    stage = load_stage_model(wish(checkpoint), Mesh(1, 1).coord(0), SoloComm())
    return with_prompt_steps(stage, stage.runner(num_pages=32, num_slots=4), recorder)


class Passing:
    """A model that says whether its prompts shared a step, and a recorder whose replays do nothing."""

    def __init__(self) -> None:
        self.shared: list[bool] = []
        self.sequences: Sequences | None = None

    def forward(self, batch: ForwardBatch, hidden_TH: torch.Tensor | None) -> torch.Tensor:
        self.shared.append(batch.sequences.shared)
        self.sequences = batch.sequences
        return torch.zeros(len(batch.token_ids_T), 8)

    def host_copy(self, values: torch.Tensor, bound: tuple[int, ...]) -> tuple[int, ...]:
        return bound

    def record(self, run: Callable[[], T]) -> Callable[[], T]:
        left = run()
        return lambda: left


def passing(*, captured: bool, longest: int = 40_000) -> tuple[PromptSteps, Passing]:
    passes = Passing()
    steps = PromptSteps(
        passes,  # type: ignore[arg-type]
        StageCache(16, {}, {}, {}, {}),
        decodes=(0, 64),
        rows=(64, 512),
        prompts=16,
        captured=captured,
        recorder=passes,  # type: ignore[arg-type]
        max_model_len=longest,
        hidden_size=None,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        row_multiple=1,
    )
    steps.capture(lambda rows: None)
    passes.shared.clear()
    return steps, passes


def step_of(decodes: int, rows: tuple[int, ...], contexts: tuple[int, ...] | None = None) -> HostRows:
    starts = tuple(accumulate((*(1,) * decodes, *rows), initial=0))
    many = len(starts) - 1
    held = (*(0,) * decodes, *(contexts or (0,) * len(rows)))
    tokens, positions, places = (np.zeros(starts[-1], dtype=np.int64) for _ in range(3))
    table = np.zeros((many, 7), dtype=np.int32)
    return HostRows(tokens, positions, places, starts, held, (1,) * many, table, decodes, ())


def plan_of(decodes: int, rows: tuple[int, ...], contexts: tuple[int, ...] | None = None) -> Plan:
    held = contexts or (0,) * len(rows)
    prompts = (
        Work(90 + i, start, many, False, False, 1) for i, (start, many) in enumerate(zip(held, rows, strict=True))
    )
    return Plan(0, (*(Work(rid, 3, 1, True, True, 1) for rid in range(decodes)), *prompts))


@pytest.mark.parametrize(
    ("decodes", "rows", "pending"),
    [
        *((0, (70,), 0), (0, (70, 9), 0)),
        *((3, (500,), 0), (3, (500,), 2), (3, (9,) * 16, 0), (3, (9,) * 16, 3)),
        *((64, (32,) * 16, 0), (64, (32,) * 16, 2)),
    ],
)
def test_a_replayed_step_costs_the_host_one_transfer_and_some_copies(
    monkeypatch: pytest.MonkeyPatch, decodes: int, rows: tuple[int, ...], pending: int
) -> None:
    """Whatever the layers: they are not called. A prompt that is alone never has the kernels of several."""
    sent: list[int] = []
    into = Upload.into

    def counted(upload: Upload, target: torch.Tensor, arrays: Sequence[Array]) -> None:
        sent.append(sum(array.nbytes for array in arrays))
        into(upload, target, arrays)

    steps, passes = passing(captured=True)
    step = step_of(decodes, rows)
    step = replace(step, pending=tuple((row, 1) for row in range(pending)))
    assert steps.takes(plan_of(decodes, rows))
    monkeypatch.setattr(Upload, "into", counted)
    monkeypatch.setattr(Upload, "__call__", counted_call(sent))
    with Launches() as launches:
        out_TH = steps.forward(step, None, torch.arange(9))
    assert out_TH.shape == (decodes + sum(rows), 8) and not passes.shared
    assert len(sent) == 1 + bool(pending)
    assert sent[0] < 8 * (3 * (64 + 512) + 3 * 80) + step.pages_BP.nbytes, "pages of requests alone, not of padding"
    assert 4 <= launches.count <= 7 + 2 * bool(pending)
    plain, passes = passing(captured=False)
    plain.forward(step, None)
    assert passes.shared == [len(rows) > 1]


def counted_call(sent: list[int]) -> Callable[..., list[torch.Tensor]]:
    def call(upload: Upload, *arrays: Array) -> list[torch.Tensor]:
        sent.append(sum(array.nbytes for array in arrays))
        return [torch.from_numpy(array) for array in arrays]

    return call


class Launches(TorchFunctionMode):
    """Counts calls that give a GPU work: all but views, new memory, and questions about them."""

    WORK = ("copy_", "fill_", "zero_", "__setitem__", "index_copy_", "index_select")
    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += getattr(func, "__name__", "") in self.WORK
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("decodes", "rows", "contexts", "taken"),
    [
        (64, (32,) * 16, None, True),
        (65, (32,) * 2, None, False),
        (0, (3,) * 17, None, False),
        (0, (500, 13), None, False),
        (0, (50,), (39_000,), True),
        # 131072 keys are copied at a time, each prompt's in units of 128
        (0, (128, 128, 128, 128), (39_000 - 96, 39_000 - 96, 39_000 - 96, 13_824), True),
        (0, (128, 128, 128, 128), (39_000 - 96, 39_000 - 96, 39_000 - 96, 13_825), False),
    ],
)
def test_a_step_is_taken_where_there_is_room(
    decodes: int, rows: tuple[int, ...], contexts: tuple[int, ...] | None, taken: bool
) -> None:
    steps, _ = passing(captured=False)
    assert steps.takes(plan_of(decodes, rows, contexts)) == taken


@pytest.mark.parametrize("longest", [600, 300_000])
def test_the_host_has_bounds_that_attention_copies_at_one_time(longest: int) -> None:
    steps, passes = passing(captured=False, longest=longest)
    steps.forward(step_of(0, (40, 9)), None)
    assert passes.sequences is not None
    prompts = passes.sequences.prompt
    keys = prompts.contexts[0] + prompts.row_starts[1] - prompts.row_starts[0]
    assert (
        prompts.shared and sum(prompts.contexts[1:]) == 0 and keys == min(KEYS_AT_A_TIME, 16 * -(-longest // 128) * 128)
    )
    assert len(prompts.contexts) == 16 and len(set(prompts.row_starts[1:])) == 1
