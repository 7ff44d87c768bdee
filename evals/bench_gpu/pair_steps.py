"""What traces of a serving pair say: how long a step of all requests took, and when each rank was at work. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rocm_serve.trace import StageTrace, StepTrace

Stamps = Mapping[int, Sequence[StageTrace]]  # by rank


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and quartiles."""

    median: float
    low: float
    high: float


def committed_between(trace: Sequence[StepTrace], began_ns: int, ended_ns: int) -> list[StepTrace]:
    """Return the steps whose results came in that time."""
    return [step for step in trace if began_ns <= step.committed_ns <= ended_ns]


def advances_ms(trace: Sequence[StepTrace], batch: int) -> Spread:
    """Say how long it took until `batch` more tokens were there, from each step on: each request has one more then.

    Steps of decoding requests only; with two plans in flight such an advance is two of them.
    """
    times = []
    for i, first in enumerate(trace):
        tokens = 0
        for step in trace[i + 1 :]:
            assert step.num_works == step.num_recurrent, f"step {step.seq} has rows of prompts"
            tokens += step.num_recurrent
            if tokens >= batch:
                times.append((step.committed_ns - first.committed_ns) / 1e6)
                break
    low, median, high = statistics.quantiles(times, n=4)
    return Spread(median, low, high)


def at_work(stamps: Stamps, seqs: range) -> dict[int, float]:
    """Return for each rank the share of the time from the first of these steps to the last, of any rank, that it ran.

    Ranks begin and end a pipeline's steps at different times, so each is judged over its own first and last step.
    """
    found = {}
    for rank, steps in stamps.items():
        mine = [step for step in steps if step.seq in seqs]
        assert len(mine) == len(seqs), f"rank {rank} has {len(mine)} stamps of {len(seqs)} steps"
        busy = sum(step.ended_ns - step.started_ns for step in mine)
        found[rank] = busy / (mine[-1].ended_ns - mine[0].started_ns)
    return found


def bars(stamps: Stamps, seqs: range) -> list[tuple[int, int, float, float]]:
    """Return (rank, seq, start, end) of these steps, in microseconds, cut to the time in which every rank had its turn.

    Zero is where the last rank begins its first of them; what lies behind some rank's last is left out.
    """
    chosen = {rank: [step for step in steps if step.seq in seqs] for rank, steps in stamps.items()}
    began = max(steps[0].started_ns for steps in chosen.values())
    over = min(steps[-1].ended_ns for steps in chosen.values())
    return [
        (rank, step.seq, (max(step.started_ns, began) - began) / 1e3, (min(step.ended_ns, over) - began) / 1e3)
        for rank, steps in chosen.items()
        for step in steps
        if step.ended_ns > began and step.started_ns < over
    ]
