"""Whole steps with prompts as a server has them: plans into the stage's runner, tokens out."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from rocm_serve.config.graphs import prompt_sizes, shared_beside
from rocm_serve.executor import step_rows
from rocm_serve.executor.graphs import DeviceGraphs
from rocm_serve.executor.loaded_stage import LoadedStage
from rocm_serve.executor.prompt_steps import PromptSteps
from rocm_serve.executor.runner import StageRunner
from rocm_serve.layers.moe import SparseMoe
from rocm_serve.messages import NewRequest, Plan, Work
from rocm_serve.tuning.floor_prefill import Mixed
from rocm_serve.types import SamplingParams

WARM_UP_STEPS = 3
TIMED_STEPS = 9
HOST_STEPS = 3  # that are timed up to their last launch
SHARED_GAP_US = 5.0  # idle time before a kernel that is worth a line
_PARAMS = SamplingParams(max_tokens=1 << 20, temperature=0.0)


@dataclass(frozen=True, slots=True)
class Busy:
    """What one step did on the device, by the profiler. Units: milliseconds; kernels and gaps in microseconds."""

    busy: float  # while at least one kernel or copy ran
    idle: float  # between the first of them and the last
    kernels: dict[str, tuple[int, float]]  # name -> launches, microseconds, the longest first
    gaps: dict[str, tuple[int, float]]  # kernel that was waited for -> how often, microseconds, the longest first


@dataclass(frozen=True, slots=True)
class PrefillFinding:
    """One point. Units: milliseconds. `wall`: from plan to tokens; `host`: from plan to the last launch."""

    wall: float
    wall_low: float
    wall_high: float
    host: float
    device: Busy | None
    distinct: tuple[int, ...]  # experts touched, layer by layer, in one step
    fullest: tuple[float, ...]  # rows of the expert with most of them over those of the mean, layer by layer


class Prefilling:
    """Steps of one shape in a runner's table and caches: fresh prompts of random tokens, the same decodes beside them.

    What lies before a prompt's rows is whatever the pages hold; the state of a prompt with a context too.
    """

    def __init__(self, runner: StageRunner, vocabulary: int, shape: Mixed, steps: int, first_rid: int) -> None:
        self.runner, self.shape = runner, shape
        self._vocabulary, self._rid = vocabulary, first_rid
        self._random = np.random.default_rng(first_rid)
        self._seq = 0
        page = runner.cache.page_size
        held = next(iter(runner.cache.k_pages.values())).shape[0]
        slots = 1 + self._random.permutation(next(iter(runner.cache.ssm.values())).shape[0] - 1)
        order = self._random.permutation(held)
        each = (-(-(shape.decode_context + steps + 1) // page), -(-(shape.context + shape.rows) // page))
        cut = shape.decodes * each[0]
        assert cut + shape.prompts * each[1] <= held, f"{shape} does not fit {held} pages"
        assert shape.decodes + shape.prompts <= len(slots), f"{shape} does not fit {len(slots)} slots"
        self._slots = slots[shape.decodes : shape.decodes + shape.prompts].tolist()
        self._pages = order[cut : cut + shape.prompts * each[1]].reshape(shape.prompts, each[1]).tolist()
        self._beside = [(self._next_rid(), slot) for slot in slots[: shape.decodes].tolist()]
        self._position = shape.decode_context
        self._enter(self._beside, order[:cut].reshape(shape.decodes, each[0]).tolist(), shape.decode_context)

    def _next_rid(self) -> int:
        self._rid += 1
        return self._rid

    def _enter(self, who: Sequence[tuple[int, int]], pages: Sequence[list[int]], context: int) -> None:
        """Have the table know requests whose first `context` tokens count as cached."""
        news = tuple(NewRequest(rid, (0,) * context, _PARAMS) for rid, _ in who)
        work = tuple(
            Work(rid, 0, context, False, True, slot, tuple(own)) for (rid, slot), own in zip(who, pages, strict=True)
        )
        self.runner.table.apply(Plan(0, work, news))

    def plan(self, *, draws: bool = True) -> Plan:
        """Make the next step; its prompts are new. Without `draws` no token is drawn, as in a chunk before the last."""
        shape, self._seq = self.shape, self._seq + 1
        tokens = self._random.integers(0, self._vocabulary, len(self._beside)).tolist()
        work = [
            Work(rid, self._position, 1, True, draws, slot, tokens=(token,))
            for (rid, slot), token in zip(self._beside, tokens, strict=True)
        ]
        self._position += 1
        news = []
        for slot, pages in zip(self._slots, self._pages, strict=True):
            rid, length = self._next_rid(), shape.context + shape.rows
            prompt = tuple(self._random.integers(0, self._vocabulary, length).tolist())
            new = NewRequest(rid, prompt, _PARAMS)
            if shape.context:
                before = Work(rid, 0, shape.context, False, False, slot, tuple(pages))
                self.runner.table.apply(Plan(0, (before,), (new,)))
            else:
                news.append(new)
            own = () if shape.context else tuple(pages)
            work.append(Work(rid, shape.context, shape.rows, False, draws, slot, own))
        return Plan(self._seq, tuple(work), tuple(news))

    def step(self, *, draws: bool = True) -> float:
        """Run one step and forget its prompts; return its seconds from plan to tokens, or to its last launch."""
        plan = self.plan(draws=draws)
        _wait(self.runner.device)
        start = time.perf_counter()
        # The result of a step that draws nothing comes when the device has passed it.
        (self.runner.step if draws else self.runner.launch)(plan, None)
        taken = time.perf_counter() - start
        _wait(self.runner.device)
        self._forget([work.rid for work in plan.work[self.shape.decodes :]])
        return taken

    def release(self) -> None:
        """Let the table forget what decoded beside."""
        self._forget([rid for rid, _ in self._beside])

    def _forget(self, rids: Sequence[int]) -> None:
        if rids:
            self.runner.step(Plan(self._seq, (), released=tuple(rids)), None)


def at_fixed_sizes(stage: LoadedStage, runner: StageRunner, wished: Sequence[Mixed]) -> StageRunner:
    """Give a runner captured prompt steps of the sizes that these need, where the server has such steps.

    Errors: UserError where the device refuses to capture.
    """
    resolved = stage.resolved
    sizes, counts = prompt_sizes(step_rows.prompt_rows(resolved)), step_rows.prompt_counts(resolved)
    most = step_rows.prompt_sequences(resolved)
    taken = [
        one
        for one in wished
        if sizes and one.prompts <= most and one.prompts * one.rows <= sizes[-1] and one.decodes <= counts[-1]
    ]
    if runner.prompts is None or not taken:
        return replace(runner, prompts=None)
    several = any(one.prompts > 1 for one in taken)  # they have room for the most that decode, always
    steps = PromptSteps(
        stage.model,
        runner.cache,
        decodes=sorted({_size(counts, one.decodes) for one in taken} | ({counts[-1]} if several else set())),
        rows=sorted({_size(sizes, one.prompts * one.rows) for one in taken}),
        prompts=most if several else 1,
        captured=True,
        recorder=DeviceGraphs(resolved.max_model_len, beside=shared_beside(resolved.device)),
        max_model_len=resolved.max_model_len,
        hidden_size=None,
        dtype=stage.dtype,
        device=stage.device,
        row_multiple=runner.row_multiple,
    )
    steps.capture(lambda rows: None)
    return replace(runner, prompts=steps)


def _size(sizes: Sequence[int], count: int) -> int:
    return next(size for size in sizes if size >= count)


def chosen_experts(stage: LoadedStage, steps: Prefilling) -> list[torch.Tensor]:
    """Run one step, not a captured one, and count the rows of each expert, layer by layer."""
    layers = [module for module in stage.model.modules() if isinstance(module, SparseMoe)]  # type: ignore[attr-defined]
    chosen: list[torch.Tensor] = []
    experts = stage.facts.num_experts

    def observe(ids_nk: torch.Tensor, live: int | torch.Tensor) -> None:
        chosen.append(ids_nk[: int(live)].flatten().long().bincount(minlength=experts).cpu())

    runner = steps.runner
    steps.runner = replace(runner, prompts=None)
    for layer in layers:
        layer.observe = observe
    try:
        steps.step()
    finally:
        steps.runner = runner
        for layer in layers:
            layer.observe = None
    return chosen


def busy_in(spans: Sequence[tuple[float, float, str]]) -> Busy:
    """Add up what ran, (start, end, name) in microseconds. What overlaps is busy once, and counts as itself each."""
    kernels: dict[str, tuple[int, float]] = {}
    gaps: dict[str, tuple[int, float]] = {}
    busy = idle = 0.0
    done = min((start for start, _, _ in spans), default=0.0)
    for start, end, name in sorted(spans):
        count, us = kernels.get(name, (0, 0.0))
        kernels[name] = (count + 1, us + end - start)
        gap = max(0.0, start - done)
        if gap:
            idle += gap
            count, us = gaps.get(name, (0, 0.0))
            gaps[name] = (count + 1, us + gap)
        busy += max(0.0, end - max(start, done))
        done = max(done, end)
    gaps = {name: found for name, found in gaps.items() if found[1] >= SHARED_GAP_US}
    return Busy(busy / 1e3, idle / 1e3, _longest_first(kernels), _longest_first(gaps))


def _longest_first(found: dict[str, tuple[int, float]]) -> dict[str, tuple[int, float]]:
    return dict(sorted(found.items(), key=lambda one: -one[1][1]))


def profiled(steps: Prefilling) -> Busy | None:
    """Run one step under the profiler, which makes launches somewhat slower: gaps are at most what it shows."""
    if steps.runner.device.type != "cuda":
        return None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        steps.step()
    cuda = torch.autograd.DeviceType.CUDA
    spans = [
        (one.time_range.start, one.time_range.end, one.name) for one in profiler.events() if one.device_type == cuda
    ]
    return busy_in(spans) if spans else None


def measure(
    stage: LoadedStage, runner: StageRunner, shape: Mixed, first_rid: int, *, steps: int = TIMED_STEPS
) -> PrefillFinding:
    """Measure one point. Errors: SamplingFailed when logits are not finite."""
    in_all = WARM_UP_STEPS + steps + HOST_STEPS + 4
    prefilling = Prefilling(runner, stage.facts.vocab_size, shape, in_all, first_rid)
    chosen = chosen_experts(stage, prefilling)
    distinct = tuple(int((counts > 0).sum()) for counts in chosen)
    fullest = tuple(float(counts.max() / counts.float().mean()) for counts in chosen)
    for _ in range(WARM_UP_STEPS):
        prefilling.step()
    times = [prefilling.step() * 1e3 for _ in range(steps)]
    host = statistics.median(prefilling.step(draws=False) * 1e3 for _ in range(HOST_STEPS))
    device = profiled(prefilling)
    prefilling.release()
    low, median, high = statistics.quantiles(times, n=4)
    return PrefillFinding(median, low, high, host, device, distinct, fullest)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
