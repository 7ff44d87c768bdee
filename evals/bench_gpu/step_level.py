"""Whole decode steps as a server has them: plans into the stage's runner, tokens out.

One after the other, from a plan to its tokens, or each planned and launched while the one before it runs: then a step
is the time from one result to the next. What a server's core does in that time, in a process of its own with several
ranks, is no part of it.

Letters: B requests, S slots.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch

from rocm_serve.config.graphs import shared_beside
from rocm_serve.executor.decode import DecodeSteps
from rocm_serve.executor.graphs import DeviceGraphs
from rocm_serve.executor.launched import Launched
from rocm_serve.executor.loaded_stage import LoadedStage
from rocm_serve.executor.runner import StageRunner
from rocm_serve.layers.moe import SparseMoe
from rocm_serve.messages import NewRequest, Plan, StepResult, Work
from rocm_serve.ops.batch import StageCache
from rocm_serve.types import SamplingParams

T = TypeVar("T")

WARM_UP_STEPS = 6
TIMED_STEPS = 40


@dataclass(frozen=True, slots=True)
class StepFinding:
    """One point. Units: milliseconds. `wall`: a step from plan to tokens, or ahead from result to result; `device`: the
    captured part alone."""

    wall: float
    wall_low: float
    wall_high: float
    device: float | None
    device_how: str
    distinct: tuple[int, ...]  # experts touched, layer by layer, in one step
    kernels: dict[str, tuple[int, float]]  # name -> launches of one step, their microseconds; empty if not asked for


class Decoding:
    """B requests of `context` tokens each in a runner's table and caches, decoding greedily from there.

    What is drawn is kept in `drawn`, but the next tokens are random ones: a random model may draw few different tokens,
    and rows that are alike choose the same experts.
    """

    def __init__(
        self, runner: StageRunner, vocabulary: int, batch: int, context: int, steps: int, first_rid: int
    ) -> None:
        page = runner.cache.page_size
        self.runner = runner
        self._context = context
        self._rids = range(first_rid, first_rid + batch)
        self.drawn: list[int] = []
        self._vocabulary = vocabulary
        self._random = np.random.default_rng(first_rid)
        self._seq = 0
        self._untold: list[tuple[int, ...]] = [()] * batch  # drawn by a step that the last plan did not wait for
        pages = -(-(context + steps + 1) // page)
        held = next(iter(runner.cache.k_pages.values())).shape[0]
        slots = next(iter(runner.cache.ssm.values())).shape[0] - 1
        assert batch * pages <= held and batch <= slots, f"{batch} requests of {pages} pages do not fit"
        order = self._random.permutation(held)[: batch * pages].reshape(batch, pages).tolist()
        self._slots = (1 + self._random.permutation(slots)[:batch]).tolist()
        self.position = context
        # One prompt for all: what is cached is random, so nothing is computed from it.
        prompt = (0,) * context
        params = SamplingParams(max_tokens=1 << 20, temperature=0.0)
        news = tuple(NewRequest(rid, prompt, params) for rid in self._rids)
        work = tuple(
            Work(rid, 0, context, False, True, slot, tuple(own))
            for rid, slot, own in zip(self._rids, self._slots, order, strict=True)
        )
        runner.table.apply(Plan(0, work, news))

    def plan(self) -> Plan:
        """Make the plan of the next step."""
        tokens = self._random.integers(0, self._vocabulary, len(self._rids)).tolist()
        told, self._untold = self._untold, [()] * len(self._rids)
        return self._plan([(*before, token) for before, token in zip(told, tokens, strict=True)])

    def _plan(self, tokens: Sequence[tuple[int, ...]], *, pending: bool = False) -> Plan:
        at, self._seq = self.position, self._seq + 1
        self.position += 1
        return Plan(
            self._seq,
            tuple(
                Work(rid, at, 1, True, True, slot, tokens=told, pending=pending)
                for rid, slot, told in zip(self._rids, self._slots, tokens, strict=True)
            ),
        )

    def step(self) -> float:
        """Run one step; return its seconds from plan to tokens on the host."""
        plan = self.plan()
        start = time.perf_counter()
        result = self.runner.step(plan, None)
        taken = time.perf_counter() - start
        assert isinstance(result, StepResult)
        self.drawn = [one.tokens[-1] for one in result.sampled]
        return taken

    def steps_ahead(self, count: int) -> list[float]:
        """Run steps, each launched before the one before it is read; return `count` times from result to result.

        On the device, too, random tokens take the place of those drawn: one small kernel more a step.
        """
        newest_S = self.runner.newest_S
        assert newest_S is not None
        random_NS = self._random.integers(0, self._vocabulary, (count + 2, len(newest_S)))
        tokens_NS = iter(torch.from_numpy(random_NS).to(newest_S.device))

        def launch(plan: Plan) -> Launched:
            left = self.runner.launch(plan, None)
            assert isinstance(left, Launched)
            newest_S.copy_(next(tokens_NS))
            return left

        running = deque([launch(self.plan())])
        told: list[tuple[int, ...]] = [()] * len(self._rids)
        times = []
        for _ in range(count + 1):
            running.append(launch(self._plan(told, pending=True)))
            told = [one.tokens for one in running.popleft().result().sampled]
            times.append(time.perf_counter())
        self.drawn = [one.tokens[-1] for one in running.popleft().result().sampled]
        self._untold = told
        return [after - before for before, after in zip(times, times[1:], strict=False)]

    def release(self) -> None:
        """Let the table forget these requests."""
        self.runner.step(Plan(self._seq + 1, (), released=tuple(self._rids)), None)


def randomise(cache: StageCache, g: torch.Generator) -> None:
    """Fill pages and states with random numbers: cached keys of size one, small states."""
    for pages in (*cache.k_pages.values(), *cache.v_pages.values()):
        if pages.dtype.itemsize == 1:
            for page in pages.split(1 << 14):
                page.copy_(torch.randn(page.shape, generator=g, device=page.device, dtype=torch.bfloat16))
        else:
            pages.normal_(generator=g)
    for state in cache.conv.values():
        state.normal_(generator=g)
    for state in cache.ssm.values():
        state.normal_(0.0, 0.1, generator=g)


def distinct_experts(stage: LoadedStage, step: Decoding) -> tuple[int, ...]:
    """Run one step and count the experts that each layer's rows chose."""
    layers = [module for module in stage.model.modules() if isinstance(module, SparseMoe)]  # type: ignore[attr-defined]
    chosen: list[torch.Tensor] = []

    def observe(ids_nk: torch.Tensor, live: int | torch.Tensor) -> None:
        chosen.append(ids_nk[: int(live)].unique())

    for layer in layers:
        layer.observe = observe
    try:
        step.step()
    finally:
        for layer in layers:
            layer.observe = None
    return tuple(len(ids) for ids in chosen)


class Graphs(DeviceGraphs):
    """The server's recorder, which keeps the last replay, to time it alone."""

    replay: Callable[[], object] | None = None

    def record(self, run: Callable[[], T]) -> Callable[[], T]:
        """See DeviceGraphs."""
        made = super().record(run)
        self.replay = made
        return made


@dataclass(frozen=True, slots=True)
class Stepper:
    """A runner whose decode steps have one size, captured or not."""

    runner: StageRunner
    graphs: Graphs | None


def stepper(stage: LoadedStage, runner: StageRunner, batch: int, *, captured: bool, ahead: bool = False) -> Stepper:
    """Give a runner steps of this size alone: what other sizes would take to compile and record is no part of a point.

    `ahead`: the device keeps the newest tokens.
    Errors: UserError where the device refuses to capture.
    """
    slots = next(iter(runner.cache.ssm.values())).shape[0] - 1 if ahead else 0
    if stage.graph_refusal is not None:
        newest_S = torch.zeros(slots + 1, dtype=torch.int64, device=stage.device) if ahead else None
        return Stepper(replace(runner, own_newest_S=newest_S), None)
    recorder = Graphs(stage.resolved.max_model_len, beside=shared_beside(stage.resolved.device))
    steps = DecodeSteps(
        stage.model,
        runner.cache,
        runner.table,
        runner.sampler,
        sizes=(batch,),
        captured=(batch,) if captured else (),
        recorder=recorder,
        max_pages=-(-stage.resolved.max_model_len // stage.resolved.page_size),
        hidden_size=None,
        dtype=stage.dtype,
        device=stage.device,
        row_multiple=runner.row_multiple,
        slots_ahead=slots,
    )
    if captured:
        steps.capture(lambda size: None)
    return Stepper(replace(runner, decode=steps), recorder if captured else None)


def device_time(stage: LoadedStage, graphs: Graphs | None) -> tuple[float | None, str]:
    """Time replays of the captured step alone, at the position of the last step. Units: milliseconds."""
    if graphs is None or graphs.replay is None:
        return None, ""
    times = []
    for _ in range(9):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graphs.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times), "graph"


def kernels_of(graphs: Graphs | None) -> dict[str, tuple[int, float]]:
    """Say which kernels a captured step launches, how often, and how long they take together, the longest first.

    Units: microseconds of one step. Kernels that overlap are counted each.
    """
    if graphs is None or graphs.replay is None:
        return {}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        graphs.replay()
        torch.cuda.synchronize()
    events = [one for one in profiler.key_averages() if one.self_device_time_total > 0]
    events.sort(key=lambda one: -one.self_device_time_total)
    return {one.key: (one.count, one.self_device_time_total) for one in events}


def measure(
    stage: LoadedStage,
    runner: StageRunner,
    batch: int,
    context: int,
    first_rid: int,
    *,
    captured: bool,
    ahead: bool = False,
    steps: int = TIMED_STEPS,
    profile: bool = False,
) -> StepFinding:
    """Measure one point. Errors: SamplingFailed when logits are not finite; UserError of a capture."""
    plain = stepper(stage, runner, batch, captured=False)
    decoding = Decoding(plain.runner, stage.facts.vocab_size, batch, context, WARM_UP_STEPS + steps + 8, first_rid)
    distinct = distinct_experts(stage, decoding)
    chosen = stepper(stage, runner, batch, captured=captured, ahead=ahead) if captured or ahead else plain
    decoding.runner = chosen.runner
    for _ in range(WARM_UP_STEPS):
        decoding.step()
    seconds = decoding.steps_ahead(steps) if ahead else [decoding.step() for _ in range(steps)]
    times = [one * 1e3 for one in seconds]
    device, how = device_time(stage, chosen.graphs)
    kernels = kernels_of(chosen.graphs) if profile else {}
    decoding.release()
    low, median, high = statistics.quantiles(times, n=4)
    return StepFinding(median, low, high, device, how, distinct, kernels)


def points(batches: Sequence[int], contexts: Sequence[int], first: int) -> Iterator[tuple[int, int]]:
    """Yield (batch, context), those of the context `first` before all others; 32k to a batch of 64 only."""
    for context in sorted(contexts, key=lambda c: (c != first, c)):
        for batch in batches:
            if context < 32768 or batch <= 64:
                yield batch, context
