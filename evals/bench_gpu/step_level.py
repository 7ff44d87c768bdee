"""Whole decode steps as a server has them: plans into the stage's runner, tokens out. Letters: B requests."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from rocm_serve.executor.inputs import build_inputs
from rocm_serve.executor.loading import LoadedStage
from rocm_serve.executor.runner import StageRunner
from rocm_serve.layers.moe import SparseMoe
from rocm_serve.messages import NewRequest, Plan, StepResult, Work
from rocm_serve.ops.batch import StageCache
from rocm_serve.tuning.timing import time_calls
from rocm_serve.types import SamplingParams

WARM_UP_STEPS = 6
TIMED_STEPS = 40
_FIRST_TOKEN = 1


@dataclass(frozen=True, slots=True)
class StepFinding:
    """One point. Units: milliseconds. `wall`: a step from plan to tokens; `device`: model, logits and arg max alone."""

    wall: float
    wall_low: float
    wall_high: float
    device: float | None
    device_how: str
    distinct: tuple[int, ...]  # experts touched, layer by layer, in one step


class Decoding:
    """B requests of `context` tokens each in a runner's table and caches, decoding greedily from there."""

    def __init__(self, runner: StageRunner, batch: int, context: int, steps: int, first_rid: int) -> None:
        page = runner.cache.page_size
        self._runner = runner
        self._context = context
        self._rids = range(first_rid, first_rid + batch)
        self._tokens = [_FIRST_TOKEN] * batch
        self._seq = 0
        pages = -(-(context + steps + 1) // page)
        held = next(iter(runner.cache.k_pages.values())).shape[0]
        slots = next(iter(runner.cache.ssm.values())).shape[0] - 1
        assert batch * pages <= held and batch <= slots, f"{batch} requests of {pages} pages do not fit"
        order = torch.randperm(held)[: batch * pages].view(batch, pages).tolist()
        self._slots = (1 + torch.randperm(slots)[:batch]).tolist()
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
        at, self._seq = self.position, self._seq + 1
        self.position += 1
        return Plan(
            self._seq,
            tuple(
                Work(rid, at, 1, True, True, slot, tokens=(token,))
                for rid, slot, token in zip(self._rids, self._slots, self._tokens, strict=True)
            ),
        )

    def step(self) -> float:
        """Run one step; return its seconds from plan to tokens on the host."""
        plan = self.plan()
        start = time.perf_counter()
        result = self._runner.step(plan, None)
        taken = time.perf_counter() - start
        assert isinstance(result, StepResult)
        self._tokens = [one.tokens[-1] for one in result.sampled]
        return taken

    def release(self) -> None:
        """Let the table forget these requests."""
        self._runner.step(Plan(self._seq + 1, (), released=tuple(self._rids)), None)


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


@torch.inference_mode()
def device_time(stage: LoadedStage, runner: StageRunner, decoding: Decoding) -> tuple[float, str]:
    """Time the model, its logits and the arg max as one graph of this program's own, at a fixed position: the device's
    part of a step. Units: milliseconds."""
    plan = decoding.plan()
    runner.table.apply(plan)
    inputs = build_inputs(runner.table, plan, runner.cache, stage.device, runner.row_multiple)
    used = stage.facts.vocab_size

    def forward() -> None:
        hidden_TH = stage.model.forward(inputs.batch, None)
        stage.ops.draw_token(stage.model.logits(hidden_TH), first_id=0, used=used)

    forward()
    found = time_calls([forward], stage.device, replays=7, least_calls=1)
    return found.median / 1e3, found.how


def measure(
    stage: LoadedStage, runner: StageRunner, batch: int, context: int, first_rid: int, steps: int = TIMED_STEPS
) -> StepFinding:
    """Measure one point. Errors: SamplingFailed when logits are not finite."""
    decoding = Decoding(runner, batch, context, WARM_UP_STEPS + steps + 4, first_rid)
    distinct = distinct_experts(stage, decoding)
    for _ in range(WARM_UP_STEPS):
        decoding.step()
    times = [decoding.step() * 1e3 for _ in range(steps)]
    device, how = device_time(stage, runner, decoding)
    decoding.release()
    low, median, high = statistics.quantiles(times, n=4)
    return StepFinding(median, low, high, device, how, distinct)


def points(batches: Sequence[int], contexts: Sequence[int], first: int) -> Iterator[tuple[int, int]]:
    """Yield (batch, context), those of the context `first` before all others; 32k to a batch of 64 only."""
    for context in sorted(contexts, key=lambda c: (c != first, c)):
        for batch in batches:
            if context < 32768 or batch <= 64:
                yield batch, context
