"""Whether the next plan drafts: measured, size by size, on a small share of plans that run the other way. Pure.

A size is a power of two: all numbers of running requests up to it, and more than half of it. Drafting changes no token,
so any plan may draft or not. One plan in `PERIOD` of those that only decode runs the other way than its size does, in
runs of a few, because a step tells its price only when the whole pipeline works the same way. After a switch `depth`
plans pass, one for each group of requests, until drafts are there to verify, and `depth` - 1 more until no other plan
is ahead in the pipeline; a plan is measured when so many before it were of its kind.

A step's time is that from one result to the next; after a rest there are prompts first, and these are not measured.
The price of a token is the median step over the mean number of tokens: the median forgets the step that compiled a
kernel, the mean keeps the luck of acceptance.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Final

from msgspec.structs import replace

from rocm_serve.messages import DraftSpeed

PERIOD: Final = 32  # one decoding plan in so many runs the other way
WINDOW: Final = 128  # steps remembered of each size and way
LEAST: Final = 8  # steps of both ways before a size is judged
LOSES: Final = 0.97  # net speed below which a size stops drafting
GAINS: Final = 1.03  # net speed above which it drafts again


class _Steps:
    """The last measured steps of one size and way."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=WINDOW)
        self._tokens: deque[int] = deque(maxlen=WINDOW)

    def __len__(self) -> int:
        return len(self._seconds)

    def add(self, seconds: float, tokens: int) -> None:
        self._seconds.append(seconds)
        self._tokens.append(tokens)

    @property
    def seconds_per_token(self) -> float:
        """0 before anything came out."""
        tokens = fmean(self._tokens) if self._tokens else 0.0
        return median(self._seconds) / tokens if tokens else 0.0


@dataclass(slots=True)
class _Size:
    speed: DraftSpeed
    steps: dict[bool, _Steps] = field(default_factory=lambda: {True: _Steps(), False: _Steps()})
    plans: int = 0  # decoding ones since the last that ran the other way

    def add(self, drafting: bool, seconds: float, tokens: int, adaptive: bool) -> None:
        self.steps[drafting].add(seconds, tokens)
        way, steps = "on" if drafting else "off", self.steps[drafting]
        self.speed = replace(self.speed, **{f"{way}_s": steps.seconds_per_token, f"{way}_steps": len(steps)})
        if adaptive and min(map(len, self.steps.values())) >= LEAST:
            net = self.speed.net
            self.speed = replace(self.speed, drafting=net >= LOSES if self.speed.drafting else net > GAINS)


@dataclass(frozen=True, slots=True)
class _Planned:
    """A plan that is out. `streak`: how many of its size and way it ends; 0: it does more than decode."""

    size: int
    drafting: bool
    streak: int


class DraftPolicy:
    """`adaptive`: a size at which drafting loses stops; otherwise all draft, and the share only measures.

    Call `wants` before a plan is made, `planned` when there is one, `committed` when its result is back, in that order
    of plans.
    """

    def __init__(self, depth: int, *, adaptive: bool) -> None:
        self._depth = depth
        self._adaptive = adaptive
        self._run = 2 * depth + 2  # plans that run the other way together: three are measured
        self._sizes: dict[int, _Size] = {}
        self._out: dict[int, _Planned] = {}  # by seq
        self._newest = _Planned(0, True, 0)
        self._committed_s: float | None = None
        self._trial: bool | None = None  # the way of the run that is on
        self._trial_left = 0  # decoding plans of it
        self._trial_patience = 0  # plans of any kind

    def wants(self, requests: int) -> bool:
        """Say whether the next plan shall draft, with `requests` running."""
        return self._size(requests).speed.drafting if self._trial is None else self._trial

    def planned(self, seq: int, requests: int, drafting: bool, decodes: bool) -> None:
        """Note a plan. `decodes`: it has nothing but newest tokens and drafts, so that it can be measured."""
        size, newest = self._size(requests), self._newest
        same = (newest.size, newest.drafting) == (size.speed.requests, drafting)
        streak = (newest.streak + 1 if same else 1) if decodes else 0
        self._newest = self._out[seq] = _Planned(size.speed.requests, drafting, streak)
        if self._trial is not None:
            self._trial_left -= decodes
            self._trial_patience -= 1
            if not self._trial_left or not self._trial_patience:
                self._trial = None
        elif decodes:
            size.plans += 1
            if size.plans >= self._run * (PERIOD - 1):
                size.plans = 0
                self._trial = not size.speed.drafting
                self._trial_left, self._trial_patience = self._run, 4 * self._run

    def committed(self, seq: int, tokens: int, now_s: float) -> None:
        """Note the result of a plan: `tokens` came out of it, at `now_s` on a clock that only goes forward."""
        plan, before_s = self._out.pop(seq), self._committed_s
        self._committed_s = now_s
        if plan.streak >= 2 * self._depth and before_s is not None:
            self._sizes[plan.size].add(plan.drafting, now_s - before_s, tokens, self._adaptive)

    def speeds(self) -> tuple[DraftSpeed, ...]:
        return tuple(self._sizes[size].speed for size in sorted(self._sizes))

    def _size(self, requests: int) -> _Size:
        size = 1 << (max(requests, 1) - 1).bit_length()
        if size not in self._sizes:
            self._sizes[size] = _Size(DraftSpeed(size, True, 0.0, 0.0))
        return self._sizes[size]
