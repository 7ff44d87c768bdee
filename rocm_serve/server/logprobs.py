"""Log-probs in the shapes of OpenAI's completions and chat, and of vLLM's prompt_logprobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rocm_serve.tokens.tokenizer import Tokenizer
from rocm_serve.types import TokenLogprob

LOWEST = -9999.0  # JSON has no -Infinity; OpenAI's own stand-in


class Scored(NamedTuple):
    """One token of an answer. `entry` None: its log-prob is not defined (the first token of a prompt)."""

    token: int
    entry: TokenLogprob | None
    offset: int  # where its text begins


@dataclass(frozen=True)
class LogprobWriter:
    """Writes scores with token strings, or with `token_id:N` for all of them."""

    tokenizer: Tokenizer
    num_top: int
    tokens_as_ids: bool = False

    def lists(self, scored: Sequence[Scored]) -> dict[str, object]:
        """Return the `logprobs` object of a completion: four parallel lists.

        `top_logprobs` holds the token itself and the `num_top` best. Two ids that read alike stay two entries: the
        later one is written `token_id:N`, so the largest value of the dict is the true maximum.
        """
        return {
            "tokens": [self.name(one.token) for one in scored],
            "token_logprobs": [None if one.entry is None else max(one.entry.logprob, LOWEST) for one in scored],
            "top_logprobs": [None if one.entry is None else self.top(one.entry) for one in scored],
            "text_offset": [one.offset for one in scored],
        }

    def top(self, entry: TokenLogprob) -> dict[str, float]:
        """Return the token itself and the best others by name."""
        top = {self.name(entry.token): max(entry.logprob, LOWEST)}
        for other, value in zip(entry.top_ids[: self.num_top], entry.top_logprobs, strict=False):
            if other != entry.token:
                name = self.name(other)
                top[f"token_id:{other}" if name in top else name] = max(value, LOWEST)
        return top

    def chat_content(self, scored: Sequence[Scored]) -> list[dict[str, object]]:
        """Return `logprobs.content` of a chat answer: one object per token, the `num_top` best inside it."""
        content: list[dict[str, object]] = []
        for one in scored:
            entry = one.entry
            assert entry is not None, "a chat answer shows no prompt tokens"
            best = zip(entry.top_ids[: self.num_top], entry.top_logprobs, strict=False)
            own = self._chat_token(one.token, entry.logprob)
            content.append({**own, "top_logprobs": [self._chat_token(token, value) for token, value in best]})
        return content

    def _chat_token(self, token: int, value: float) -> dict[str, object]:
        return {
            "token": self.name(token),
            "logprob": max(value, LOWEST),
            "bytes": list(self.tokenizer.bytes_of([token])),
        }

    def name(self, token: int) -> str:
        return f"token_id:{token}" if self.tokens_as_ids else self.tokenizer.token_string(token)


def prompt_logprob_object(tokenizer: Tokenizer, entry: TokenLogprob, num_top: int) -> dict[str, dict[str, object]]:
    """Return one position of vLLM's `prompt_logprobs`: token id -> {logprob, rank, decoded_token}.

    `rank` is null for a token that is not among the best ones asked for.
    """
    own_rank = entry.top_ids.index(entry.token) + 1 if entry.token in entry.top_ids else None
    found = {str(entry.token): _object(tokenizer, entry.token, entry.logprob, own_rank)}
    ranked = zip(entry.top_ids[:num_top], entry.top_logprobs, strict=False)
    for rank, (token, value) in enumerate(ranked, 1):
        found.setdefault(str(token), _object(tokenizer, token, value, rank))
    return found


def _object(tokenizer: Tokenizer, token: int, value: float, rank: int | None) -> dict[str, object]:
    return {"logprob": max(value, LOWEST), "rank": rank, "decoded_token": tokenizer.token_string(token)}
