"""Exact tests on counts of right and wrong answers. Pure: no table, no normal approximation."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

ALPHA: Final = 0.01  # false alarms of one rule on a server that is as good as the reference
CLEAR_ALPHA: Final = 0.001  # below this even one rerun cannot be asked for
CONFIDENCE: Final = 0.95  # of intervals that are shown

FloorOutcome = Literal["pass", "rerun", "fail"]


def binomial_at_most(count: int, trials: int, chance: float) -> float:
    """Return P(X <= count) for X of `trials` with `chance` each. Relative error below 1e-9 for trials up to 1e5."""
    if count < 0:
        return 0.0
    if count >= trials:
        return 1.0
    if chance <= 0.0:
        return 1.0
    if chance >= 1.0:
        return 0.0
    log_chance, log_other = math.log(chance), math.log1p(-chance)
    whole = math.lgamma(trials + 1)
    terms = (
        whole - math.lgamma(k + 1) - math.lgamma(trials - k + 1) + k * log_chance + (trials - k) * log_other
        for k in range(count + 1)
    )
    return min(1.0, math.fsum(map(math.exp, terms)))


def least_passing(trials: int, chance: float, alpha: float) -> int:
    """Return the smallest count c with P(X <= c) >= alpha: a server as good as `chance` is below it less often."""
    low, high = 0, trials
    while low < high:
        middle = (low + high) // 2
        if binomial_at_most(middle, trials, chance) >= alpha:
            high = middle
        else:
            low = middle + 1
    return low


def mcnemar_worse(lost: int, gained: int) -> float:
    """Return the exact one-sided p of `lost` or more among lost + gained, if each were as likely as the other."""
    discordant = lost + gained
    if lost == 0:
        return 1.0
    ways = sum(math.comb(discordant, k) for k in range(lost, discordant + 1))
    return ways / (1 << discordant)


def interval(right: int, trials: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return the Clopper-Pearson interval of a share: both tails are exact. Errors: ValueError without trials."""
    if trials < 1:
        raise ValueError("a share of no trials has no interval")
    tail = (1 - confidence) / 2
    low = 0.0 if right == 0 else _solve(lambda chance: 1 - binomial_at_most(right - 1, trials, chance) < tail)
    high = 1.0 if right == trials else _solve(lambda chance: binomial_at_most(right, trials, chance) > tail)
    return low, high


def _solve(below: Callable[[float], bool]) -> float:
    """Bisect [0, 1] for the chance where `below` turns from true to false."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if below(middle):
            low = middle
        else:
            high = middle
    return (low + high) / 2


@dataclass(frozen=True, slots=True)
class Floor:
    """The least counts for `trials` questions and for twice as many, from a reference share."""

    chance: float
    trials: int
    alpha: float = ALPHA

    @property
    def least(self) -> int:
        """Right answers that pass at once."""
        return least_passing(self.trials, self.chance, self.alpha)

    @property
    def least_for_a_rerun(self) -> int:
        """Right answers below which no second run is asked for."""
        return min(self.least, least_passing(self.trials, self.chance, min(CLEAR_ALPHA, self.alpha)))

    @property
    def least_pooled(self) -> int:
        """Right answers of two runs together that pass."""
        return least_passing(2 * self.trials, self.chance, self.alpha)

    def first(self, right: int) -> FloorOutcome:
        """Judge a first run: clear, or close enough that one more run is worth it."""
        if right >= self.least:
            return "pass"
        return "rerun" if right >= self.least_for_a_rerun else "fail"

    def pooled(self, first: int, second: int) -> FloorOutcome:
        """Judge two runs by their sum. There is no third: trying until it is green would pass anything."""
        return "pass" if first + second >= self.least_pooled else "fail"


def floor_chance(right: int, trials: int) -> float:
    """Return the share that a floor is taken from. A reference without an error is read as one error in n + 2.

    Otherwise one wrong answer of a server would fail at any n.
    """
    return (trials + 1) / (trials + 2) if right == trials else right / trials
