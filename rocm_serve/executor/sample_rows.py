"""What a sampler is asked and answers: one row of logits and the request it belongs to, the token that it gives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from rocm_serve.executor.upload import Array
from rocm_serve.ops.sampling import rng
from rocm_serve.types import SamplingParams, TokenLogprob

NARROW_LIMIT = 1024  # up to this top_k, the shards exchange candidates instead of rows


class SamplingFailed(RuntimeError):
    """The logits allow no token. The message names the rows; nothing was sampled for any row of the call."""


class TokenCounts:
    """How often each id occurred in one request: built when first asked, then advanced by the new tokens only."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self._prompt_ids = prompt_ids
        self._prompt: frozenset[int] | None = None
        self._output: Counter[int] = Counter()
        self._num_counted = 0

    def output(self, output_ids: Sequence[int]) -> Counter[int]:
        """Count the generated tokens; `output_ids` only ever grows at its end."""
        assert len(output_ids) >= self._num_counted, "the output of a request got shorter"
        self._output.update(output_ids[self._num_counted :])
        self._num_counted = len(output_ids)
        return self._output

    def prompt(self) -> frozenset[int]:
        if self._prompt is None:
            self._prompt = frozenset(self._prompt_ids)
        return self._prompt


@dataclass(slots=True)
class SampleRow:
    """One row of logits and the request it belongs to.

    `position` is the index of the new token in its sequence, the prompt counted; `num_generated` says how many tokens
    this request generated before it; both may be advanced by the owner. `prompt_ids` and `output_ids` are read by
    penalties only. `counts` may be kept by the caller, one object per request, so that penalties cost what the new
    tokens cost. What follows from `params` is found once: `filtered` (top_k, top_p, min_p), `narrow` (of those, by
    candidates), `edited` (bias, masks, penalties), `plain` (none of these, and no log-probs), `stream` (of its random
    numbers; 0 where nothing is drawn).
    """

    params: SamplingParams
    position: int
    num_generated: int
    prompt_ids: Sequence[int] = ()
    output_ids: Sequence[int] = ()
    counts: TokenCounts | None = None
    filtered: bool = field(init=False)
    narrow: bool = field(init=False)
    edited: bool = field(init=False)
    plain: bool = field(init=False)
    stream: int = field(init=False)

    def __post_init__(self) -> None:
        p = self.params
        self.filtered = not p.greedy and (p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0.0)
        self.narrow = self.filtered and 0 < p.top_k <= NARROW_LIMIT
        penalties = (p.repetition_penalty, p.presence_penalty, p.frequency_penalty) != (1.0, 0.0, 0.0)
        self.edited = bool(p.logit_bias) or p.min_tokens > 0 or penalties
        self.plain = not self.edited and not self.filtered and p.logprobs is None
        self.stream = 0 if p.greedy else rng.choice_stream(p.seed, p.choice)


class SampledToken(NamedTuple):
    token: int
    logprob: TokenLogprob | None = None


def keys_of(rows: Sequence[SampleRow]) -> Array:
    """Return the keys of the rows' random numbers, int64; those of rows that draw nothing mean nothing."""
    streams = np.array([row.stream for row in rows], dtype=np.uint64)
    return rng.row_keys(streams, np.array([row.position for row in rows], dtype=np.uint64))
