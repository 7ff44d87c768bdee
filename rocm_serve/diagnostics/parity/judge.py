"""Whether two sides' log-probs agree: noise, bar and largest difference, prompt by prompt."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Literal

import msgspec

from rocm_serve.diagnostics.parity.drive import Row, Scored

FP8_ROWS = "fp8_1x128"  # float32 all through, but rows that meet FP8 weights become FP8
COMPARED = 5  # best ids of either side that are looked up at the other
_FLOAT32_LEAST = 1e-4
_BF16_LEAST = 1e-3
ROUNDING = "median of |A - A in float32| over all prompts"
_MORE_THAN_ROUNDING = 4.0  # clean medians came to twice the noise: docs/parity.md has what this cannot see


class Rule(msgspec.Struct, frozen=True):
    """How far log-probs may lie apart: the larger of `least` and `times` the noise of `whose`.

    Where the sides round in different places, one flipped choice of an expert moves a position by whole units on a
    right server; a fault moves most positions. So there the median position is judged.
    """

    dtype: str
    least: float
    times: float
    whose: str
    of: Literal["every", "median"] = "every"  # which position of a prompt is held against the bar

    def bar(self, noise: float) -> float:
        return max(self.least, self.times * noise)

    def __str__(self) -> str:
        times = "" if self.times == 1 else f"{self.times:g} x "
        noise = self.whose if self.whose == ROUNDING else f"{self.whose}'s own noise"
        which = "median of |A - B|" if self.of == "median" else "|A - B|"
        return f"{which} <= max({self.least:g}, {times}{noise}), {self.dtype}"


def rule_of(dtype: str, *, hf: bool, rounding: bool = False) -> Rule:
    """Return the rule of docs/parity.md for a comparison in `dtype`, or FP8_ROWS; against HF in float32 the noise is
    HF's.

    `rounding`: the sides round in different places, and the noise is how far A lies from itself in float32.
    """
    if dtype == "float32":
        return Rule(dtype, _FLOAT32_LEAST, 2.0, "HF" if hf else "A")
    if rounding:
        return Rule(dtype, _BF16_LEAST, _MORE_THAN_ROUNDING, ROUNDING, "median")
    return Rule(dtype, _BF16_LEAST, 1.0, "A")


def rounding_noise(a: Sequence[Scored], exact: Sequence[Scored]) -> float:
    """Return how far the log-probs of A lie from those of A in float32 at the median position."""
    return median(value for one, other in zip(a, exact, strict=True) for value in differences(one, other))


class Judged(msgspec.Struct):
    """One prompt. `first`: the first position whose log-probs lie further apart than the bar. Positions count from 0.

    `near_tie`: from this position on two experts were so close that both choices are right; what follows is left out.
    """

    index: int
    prompt_tokens: int
    new_tokens: int
    noise_of_a: float  # between all at once and token by token, at the position where that is most
    median_noise_of_a: float
    bar: float
    worst: float
    worst_at: int
    median: float
    first: int | None
    near_tie: int | None = None


def difference(one: Row, other: Row) -> float:
    """Return how far two sides lie apart at one position, over the best ids of both.

    An id that the other side does not report is less probable there than everything that is reported.
    """
    return max(_one_way(one, other), _one_way(other, one))


def _one_way(one: Row, other: Row) -> float:
    if any(math.isnan(value) for value in (*one.values(), *other.values())):
        return math.inf
    least = min(other.values())
    worst = 0.0
    for token in sorted(one, key=one.__getitem__, reverse=True)[:COMPARED]:
        there = other.get(token)
        if there is None:
            worst = max(worst, one[token] - least)
        elif there != one[token]:
            worst = max(worst, abs(one[token] - there))
    return worst


def differences(one: Scored, other: Scored) -> list[float]:
    """Return the difference of every position from 1 on."""
    assert one.ids == other.ids and len(one.rows) == len(other.rows), "two sides scored other tokens"
    return [difference(a, b) for a, b in zip(one.rows, other.rows, strict=True)]


def judge(
    a: Sequence[Scored],
    again: Sequence[Scored],
    b: Sequence[Scored],
    rule: Rule,
    noise: Sequence[float] | None,
    ties: Mapping[int, int],
) -> list[Judged]:
    """Judge every prompt. `noise` replaces A's own in the bar. `ties`: prompt -> row from which nothing is judged."""
    found = []
    for i, (one, repeated, other) in enumerate(zip(a, again, b, strict=True)):
        noises = differences(one, repeated)
        own = max(noises)
        bar = rule.bar(own if noise is None else noise[i])
        tie = ties.get(i)
        apart = differences(one, other)[:tie]  # entry j is of position j + 1 and comes out of row j
        worst = max(apart, default=0.0)
        judged = rule.of == "every" or (apart and median(apart) > bar)
        found.append(
            Judged(
                index=i,
                prompt_tokens=one.prompt_len,
                new_tokens=len(one.ids) - one.prompt_len,
                noise_of_a=own,
                median_noise_of_a=median(noises),
                bar=bar,
                worst=worst,
                worst_at=apart.index(worst) + 1 if apart else 0,
                median=median(apart) if apart else 0.0,
                first=next((j + 1 for j, value in enumerate(apart) if judged and value > bar), None),
                near_tie=tie,
            )
        )
    return found
