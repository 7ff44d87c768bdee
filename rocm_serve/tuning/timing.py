"""How long calls take: replays of a graph on a GPU, the clock on a CPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Call = Callable[[], object]
_REPLAYS = 11
_LEAST_CALLS = 8  # in one graph, so that the gap before its first kernel is shared


@dataclass(frozen=True, slots=True)
class Timing:
    """Of one call, over replays. Units: microseconds. `how`: "graph", "eager" (with the reason), or "clock"."""

    median: float
    low: float
    high: float
    how: str


def time_calls(
    calls: Sequence[Call], device: torch.device, *, replays: int = _REPLAYS, least_calls: int = _LEAST_CALLS
) -> Timing:
    """Time calls that go through several sets of operands in turn; each has run once already."""
    calls = list(calls) * -(-least_calls // len(calls))
    if device.type == "cpu":
        return _clocked(calls, replays)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    how = "graph"
    play: Call = graph.replay
    try:
        with torch.cuda.graph(graph):
            for call in calls:
                call()
    except RuntimeError as error:  # what cannot be captured is timed with its gaps, and the table says so
        torch.cuda.synchronize(device)
        how = f"eager: {str(error).splitlines()[0]}"
        play = lambda: [call() for call in calls]  # noqa: E731
    play()
    play()
    times = []
    for _ in range(replays):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        play()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / len(calls))
    return _summed(times, how)


def replayed(calls: Sequence[Call], device: torch.device) -> list[object]:
    """Return what each call has made when a graph of them all is replayed; on a CPU what they make.

    What a call leaves between its kernels is used again by the next one, as in a graph that is timed.
    """
    if device.type == "cpu":
        return [call() for call in calls]
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = [call() for call in calls]
    graph.replay()
    graph.replay()
    torch.cuda.synchronize(device)
    kept = [tuple(x.clone() for x in one) if isinstance(one, tuple) else one.clone() for one in made]
    return kept  # the graph's own memory goes with it


def _clocked(calls: Sequence[Call], replays: int) -> Timing:
    times = []
    for _ in range(replays):
        start = time.perf_counter()
        for call in calls:
            call()
        times.append((time.perf_counter() - start) * 1e6 / len(calls))
    return _summed(times, "clock")


def _summed(times: Sequence[float], how: str) -> Timing:
    low, median, high = statistics.quantiles(times, n=4)
    return Timing(median, low, high, how)


def measured_ceilings(device: torch.device, fp8: torch.dtype) -> tuple[float, float, float]:
    """Return bytes/s of a large copy, and operations/s of large bf16 and FP8 products.

    A copy's bytes are read and written; it is the copy engine's or a kernel's, the faster one. FP8 is 0 where torch
    has no such product, and on a CPU.
    """
    n, big = (1 << 30, 8192) if device.type != "cpu" else (1 << 22, 128)
    source = torch.randn(n // 4, device=device)
    target = torch.empty_like(source)
    copy = min(_once(lambda: target.copy_(source), device), _once(lambda: torch.mul(source, 1.0, out=target), device))
    a, b = (torch.randn(big, big, device=device, dtype=torch.bfloat16) for _ in range(2))
    bf16 = _once(lambda: torch.mm(a, b), device)
    if device.type == "cpu":
        return 2 * n / copy, 2 * big**3 / bf16, 0.0
    qa, qb, one = a.to(fp8), b.to(fp8).t(), torch.ones((), device=device)

    def product() -> torch.Tensor:
        return torch._scaled_mm(qa, qb, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

    try:
        quantised = 2 * big**3 / _once(product, device)
    except (RuntimeError, NotImplementedError):
        quantised = 0.0
    return 2 * n / copy, 2 * big**3 / bf16, quantised


def _once(call: Call, device: torch.device) -> float:
    call()
    return time_calls([call], device, replays=5).median * 1e-6
