"""Values that every part of the server speaks of. A leaf: imports nothing of ours, no torch."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class FinishReason(StrEnum):
    """Why a request ended, in OpenAI's words plus two of ours."""

    STOP = "stop"  # EOS, a stop token id, or (decided by the server) a stop string
    LENGTH = "length"  # max_tokens reached, or the context is full
    ABORT = "abort"  # the client went away or asked for it
    ERROR = "error"  # the engine could not go on; the output carries the sentence


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What to do with one choice of one request. Every value is validated and concrete before it gets here.

    `max_tokens` 0 scores the prompt only. `logprobs`/`prompt_logprobs`: None = off, k >= 0 = the token's own
    value plus the k best alternatives. Log-probs are those of the raw logits (before temperature, penalties
    and bias), normalised over every row of lm_head; alternatives are ids that the tokenizer knows.
    Random numbers are keyed by (seed, choice, position of the token in the sequence), nothing else.
    """

    max_tokens: int
    min_tokens: int = 0  # EOS and stop ids are masked until this many tokens are out
    temperature: float = 1.0  # 0 = greedy
    top_k: int = 0  # 0 = off
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0  # counts generated tokens only (OpenAI, vLLM)
    frequency_penalty: float = 0.0  # counts generated tokens only
    repetition_penalty: float = 1.0  # counts prompt and generated tokens (HF)
    logit_bias: dict[int, float] = {}
    stop_token_ids: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()  # empty with ignore_eos
    seed: int = 0  # unsigned 64 bit
    choice: int = 0  # index among the n choices of the request
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def hosted(self) -> bool:
        """The host has a part in its draws, or reports numbers beside its tokens: these exist when a step is over."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)
        scored = self.logprobs is not None or self.prompt_logprobs is not None
        return penalties or scored or bool(self.logit_bias) or self.min_tokens > 0

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Ids that end the request once `min_tokens` are out; masked before that."""
        return self.eos_token_ids + self.stop_token_ids


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of one token and of the best alternatives at its place, best first."""

    token: int
    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
