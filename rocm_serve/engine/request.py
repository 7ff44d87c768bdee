"""One request as the scheduler sees it, and two questions about it that need no scheduler: does it fit, is it over."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rocm_serve.engine.blocks import pages_for
from rocm_serve.messages import EffectiveLimits, Sampled, Work
from rocm_serve.types import FinishReason, SamplingParams

if TYPE_CHECKING:
    from rocm_serve.engine.holdings import InFlight


@dataclass(slots=True, eq=False)
class Request:
    """Mutable state of a request between `add` and its end.

    Known tokens are the prompt and everything sampled. `planned` of them are rows of plans (in flight or done) since
    the request was last admitted, an accepted draft's row among them; preemption sets it back to 0. The next Work
    always starts at `planned`. Where steps are planned ahead it may be one more than is known: the row of a token that
    is being drawn.
    """

    rid: int  # counts up with every added request, so it also tells the order of arrival
    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    prompt_len: int
    end_ids: tuple[int, ...]
    longest: int  # most rows ever computed for it, unless it ends before
    hosted: bool  # no row is planned behind a plan in flight that names it, while its token is not known
    out: list[int] = field(default_factory=list)
    planned: int = 0
    told: int = 0  # output tokens that the workers know
    mentioned: bool = False  # a plan has carried its NewRequest
    scored: int = 0  # prompt log-probs delivered: those of positions 1..scored
    slot: int = 0  # 0: not running
    pages: list[int] = field(default_factory=list)
    in_flight: int = 0  # plans in flight that name it
    awaits: InFlight | None = None  # the last plan in flight that brings tokens for it
    accepted: int = 0  # drafts of its last Work that the workers' state of it has yet to take in
    drafts: tuple[int, ...] = ()  # proposed for the rows after the newest token

    @property
    def known(self) -> int:
        return self.prompt_len + len(self.out)

    @property
    def decodes(self) -> bool:
        """All that is left to compute is its newest token: one output row, then a token comes out."""
        return self.planned >= self.prompt_len and self.planned == self.prompt_len + len(self.out) - 1


def longest(prompt_len: int, params: SamplingParams, max_model_len: int) -> int:
    """Most rows ever computed for it. The last token that comes out is never fed back."""
    if params.max_tokens == 0:
        return prompt_len
    return min(prompt_len + params.max_tokens, max_model_len) - 1


def refusal(prompt_len: int, params: SamplingParams, limits: EffectiveLimits) -> str | None:
    """Say in one sentence why this request can never run here, or None if it can."""
    if prompt_len == 0:
        return "the prompt is empty; it must have at least one token"
    room = limits.max_model_len - min(params.max_tokens, 1)
    if prompt_len > room:
        return (
            f"the prompt has {prompt_len} tokens; with max_tokens {params.max_tokens} at most {room} fit into the"
            f" context of {limits.max_model_len} tokens"
        )
    need = pages_for(longest(prompt_len, params, limits.max_model_len), limits.page_size)
    if need > limits.num_pages:
        return (
            f"prompt ({prompt_len} tokens) and max_tokens ({params.max_tokens}) can need {need} cache pages of"
            f" {limits.page_size} tokens; this server has {limits.num_pages}"
        )
    return None


def extend(
    request: Request, tokens: tuple[int, ...], max_model_len: int
) -> tuple[tuple[int, ...], FinishReason | None]:
    """Append new output tokens up to one that ends the request; return those appended, and why it is over."""
    for count, token in enumerate(tokens, 1):
        request.out.append(token)
        reason = ending(request, token, max_model_len)
        if reason is not None:
            return tokens[:count], reason
    return tokens, None


def check_outcome(request: Request, work: Work, outcome: Sampled) -> None:
    """Assert that a result is one of a Work that samples: what follows from its drafts, and what was asked for."""
    accepted, tokens, about = outcome.accepted, outcome.tokens, f"request {request.rid}"
    assert 0 <= accepted <= len(work.drafts), f"{accepted} of {len(work.drafts)} drafts accepted for {about}"
    assert len(tokens) == accepted + 1, f"{len(tokens)} tokens with {accepted} accepted drafts for {about}"
    assert tokens[:accepted] == work.drafts[:accepted], f"accepted drafts are not the tokens of {about}"
    assert tokens[accepted:] != work.drafts[accepted : accepted + 1], f"a right draft was not accepted for {about}"
    assert len(outcome.drafts) <= work.proposals, f"{len(outcome.drafts)} drafts proposed for {about}"
    asked = len(tokens) if request.params.logprobs is not None else 0
    assert len(outcome.logprobs) == asked, f"{len(outcome.logprobs)} log-probs for {about}"


def ending(request: Request, token: int, max_model_len: int) -> FinishReason | None:
    """Judge a request whose newest output token is `token`."""
    count = len(request.out)
    if token in request.end_ids and count > request.params.min_tokens:
        return FinishReason.STOP
    if count >= request.params.max_tokens or request.prompt_len + count >= max_model_len:
        return FinishReason.LENGTH
    return None
