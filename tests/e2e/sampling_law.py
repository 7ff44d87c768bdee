"""What the sampling fields of a request mean, in numpy float64, and how well drawn tokens agree with it.

The judge knows nothing of the server's sampler: it takes HF's raw logits, applies the documented order (logit_bias, end
ids barred by min_tokens, repetition over prompt and output, presence and frequency over the output, temperature, top_k,
top_p, min_p) and says which tokens were possible and how likely each was.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

import numpy as np
import torch
from numpy.typing import NDArray

Row = NDArray[np.float64]

SLACK = 1e-3  # distances of logits or masses below this may go either way between two implementations
BINS = 12


@dataclass(frozen=True, kw_only=True)
class Law:
    """The fields by their API names; the rest are ways to get it wrong, which a test must be able to reject."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    ends: tuple[int, ...] = ()
    order: tuple[str, ...] = ("temperature", "top_k", "top_p", "min_p")
    output_holds_prompt: bool = False
    repetition_spares_prompt: bool = False

    def wishes(self) -> dict[str, object]:
        """Return the fields that differ from the API's defaults."""
        plain = Law()
        names = [f.name for f in fields(self) if f.name not in ("ends", "order")]
        return {name: value for name in names if (value := getattr(self, name)) != getattr(plain, name)}

    def scores(self, logits: Row, prompt: Sequence[int], output: Sequence[int]) -> Row:
        """Return what is left of the logits before temperature; a barred id has -inf."""
        x = logits.copy()
        for token, bias in self.logit_bias.items():
            x[token] += bias
        if len(output) < self.min_tokens:
            x[list(self.ends)] = -np.inf
        for token in set(output) if self.repetition_spares_prompt else {*prompt, *output}:
            x[token] *= 1 / self.repetition_penalty if x[token] > 0 else self.repetition_penalty
        for token, count in Counter([*prompt, *output] if self.output_holds_prompt else output).items():
            x[token] -= self.presence_penalty + self.frequency_penalty * count
        return x

    def kept(self, falling: Row, slack: float = 0.0) -> int:
        """Return how many of the scores, in falling order, may be drawn; `slack` decides edges in favour of more."""
        x, count = falling, len(falling)
        for step in self.order:
            likely = np.exp(x[:count] - x[0])
            q = likely / likely.sum()
            if step == "temperature":
                x = x / self.temperature
            elif step == "top_k" and self.top_k:
                edge = x[min(self.top_k, count) - 1]
                count = max(min(self.top_k, count), int((x[:count] >= edge - slack).sum()) if slack else 0)
            elif step == "top_p" and self.top_p < 1:
                count = int((q.cumsum() - q < self.top_p + slack).sum())
            elif step == "min_p" and self.min_p:
                count = max(1, int((likely >= self.min_p * (1 - slack)).sum()))
        return count

    def place(self, scores: Row, token: int, chance: float) -> float | None:
        """Return where the token lies in the cumulative distribution, best token first; None if it cannot be drawn.

        `chance` in (0, 1) places it within its own share, so that places of tokens drawn by this law are uniform.
        """
        if self.temperature == 0:
            return 0.5 if scores[token] >= scores.max() - SLACK else None
        ids = np.argsort(-scores, kind="stable")
        rank = int(np.flatnonzero(ids == token)[0])
        falling = scores[ids][np.isfinite(scores[ids])]
        if rank >= self.kept(falling, SLACK):
            return None
        x = falling[: max(self.kept(falling), rank + 1)] / self.temperature
        q = np.exp(x - x[0])
        q /= q.sum()
        return float(q[:rank].sum() + chance * q[rank])


@dataclass(frozen=True)
class Drawn:
    """One answer: its prompt, its tokens, and HF's raw logits of the row before each token."""

    prompt: list[int]
    output: list[int]
    logits: Row


@dataclass(frozen=True)
class Verdict:
    """How many of the tokens a law rules out, and the chance of so uneven a spread of the others under it."""

    tokens: int
    impossible: int
    p_value: float

    @property
    def agrees(self) -> bool:
        return self.impossible == 0 and self.p_value > 1e-3

    @property
    def rejects(self) -> bool:
        return self.impossible > 0 or self.p_value < 1e-6


def judge(law: Law, answers: Sequence[Drawn]) -> Verdict:
    """Test every token by the law's support, and all places together by chi-square against a uniform spread."""
    chances = np.random.default_rng(0)
    places: list[float | None] = []
    for drawn in answers:
        for i, token in enumerate(drawn.output):
            scores = law.scores(drawn.logits[i], drawn.prompt, drawn.output[:i])
            places.append(law.place(scores, token, chances.uniform()))
    found = [place for place in places if place is not None]
    if law.temperature == 0 or not found:
        return Verdict(len(places), len(places) - len(found), 1.0)
    counts = np.histogram(found, BINS, (0.0, 1.0))[0]
    expected = len(found) / BINS
    return Verdict(len(places), len(places) - len(found), _tail(float(((counts - expected) ** 2 / expected).sum())))


def _tail(chi_square: float) -> float:
    """Return the chance of a larger chi-square with BINS - 1 degrees of freedom."""
    half = torch.tensor([(BINS - 1) / 2, chi_square / 2], dtype=torch.float64)
    value = float(torch.special.gammaincc(half[0], half[1]))
    assert not math.isnan(value)
    return value
