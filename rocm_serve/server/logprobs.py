"""Log-probs in the shape of OpenAI's completions: parallel lists, one entry per token."""

from __future__ import annotations

from dataclasses import dataclass, field

from rocm_serve.tokens.tokenizer import Tokenizer
from rocm_serve.types import TokenLogprob

LOWEST = -9999.0  # JSON has no -Infinity; OpenAI's own stand-in


@dataclass
class LogprobLists:
    """The `logprobs` object of one choice, or of one chunk of it."""

    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)

    def extend(self, other: LogprobLists) -> None:
        self.tokens += other.tokens
        self.token_logprobs += other.token_logprobs
        self.top_logprobs += other.top_logprobs
        self.text_offset += other.text_offset

    def as_dict(self) -> dict[str, object]:
        return {
            "tokens": self.tokens,
            "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs,
            "text_offset": self.text_offset,
        }


@dataclass(frozen=True)
class LogprobWriter:
    """Writes entries with token strings, or with `token_id:N` for all of them."""

    tokenizer: Tokenizer
    num_top: int
    tokens_as_ids: bool = False

    def add(self, lists: LogprobLists, token: int, entry: TokenLogprob | None, offset: int) -> None:
        """Append one token. `entry` None: its log-prob is not defined (the first token of a prompt).

        `top_logprobs` holds the token itself and the `num_top` best. Two ids that read alike stay two entries: the
        later one is written `token_id:N`, so the largest value of the dict is the true maximum.
        """
        name = self.name(token)
        lists.tokens.append(name)
        lists.text_offset.append(offset)
        if entry is None:
            lists.token_logprobs.append(None)
            lists.top_logprobs.append(None)
            return
        own = max(entry.logprob, LOWEST)
        top = {name: own}
        for other, value in zip(entry.top_ids[: self.num_top], entry.top_logprobs, strict=False):
            if other != token:
                other_name = self.name(other)
                top[f"token_id:{other}" if other_name in top else other_name] = max(value, LOWEST)
        lists.token_logprobs.append(own)
        lists.top_logprobs.append(top)

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
