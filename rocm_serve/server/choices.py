"""From a checked request body to the choices it asks for: ids within the vocabulary, lengths within the context."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from rocm_serve.messages import AddRequest, EffectiveLimits
from rocm_serve.server.errors import ApiError, bad_request
from rocm_serve.server.info import ServerInfo
from rocm_serve.server.protocol import DEFAULT_MAX_TOKENS, CompletionRequest, Prompt, SamplingFields
from rocm_serve.tokens.text_stream import TextOptions
from rocm_serve.tokens.tokenizer import Tokenizer
from rocm_serve.types import SamplingParams

GREEDY_BELOW = 1e-5  # a smaller temperature would overflow float32 logits
_SEED_MASK = 2**64 - 1


@dataclass(frozen=True)
class Choice:
    """One answer to produce. `logprobs`: how many alternatives the client asked to see, None = no log-probs."""

    index: int
    request: AddRequest
    text: TextOptions
    echo: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None  # vLLM's field of the answer; `echo` with `logprobs` shows them in `logprobs`
    tokens_as_ids: bool = False


@dataclass(frozen=True)
class Checker:
    """Checks requests against one served model."""

    tokenizer: Tokenizer
    info: ServerInfo
    limits: EffectiveLimits

    def check_model(self, name: str | None) -> None:
        """Errors: ApiError 404 for a name that is not served. No name means the served model."""
        if name is not None and name != self.info.served_model_name:
            message = f"the model {name!r} does not exist; this server has {self.info.served_model_name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def prompt_ids(self, prompt: Prompt, add_special_tokens: bool, param: str = "prompt") -> tuple[int, ...]:
        """Return the ids of one prompt.

        Errors: ApiError 400 for ids the tokenizer does not know, no ids at all, or a text that is seen to be longer
        than the context by its size or its beginning.
        """
        if isinstance(prompt, str):
            limit = self.limits.max_model_len
            largest = self.tokenizer.max_bytes(limit)
            if len(prompt) * 4 > largest and len(prompt.encode("utf-8")) > largest:
                raise self._too_long(prompt, param)
            ids = self.tokenizer.encode_within(prompt, limit, add_special_tokens)
            if ids is None:
                raise self._too_long(prompt, param)
            if not ids:
                raise bad_request(f"{param} has no tokens; the model needs at least one", param)
            return tuple(ids)
        self.check_ids(prompt, param)
        return prompt

    def _too_long(self, text: str, param: str) -> ApiError:
        message = (
            f"{param} has {len(text)} characters; that is more than fits in this server's context of "
            f"{self.limits.max_model_len} tokens"
        )
        return bad_request(message, param, "context_length_exceeded")

    def check_ids(self, ids: Sequence[int], param: str) -> None:
        """Errors: ApiError 400 for the first id that the tokenizer does not know."""
        if not ids or (min(ids) >= 0 and max(ids) < self.info.vocab_used and not self.tokenizer.has_gaps):
            return
        for token_id in ids:
            if not (token_id < self.info.vocab_used and self.tokenizer.knows(token_id)):
                message = f"{param}: token id {token_id} is not in the vocabulary (0 to {self.info.vocab_used - 1})"
                raise bad_request(message, param)

    def max_tokens(
        self, wanted: int | None, prompt_len: int, param: str = "max_tokens", prompt_param: str = "prompt"
    ) -> int:
        """Return the number of tokens to make; None takes what the context has left, 0 lets the prompt fill it.

        Errors: ApiError 400 `context_length_exceeded`. A prompt is never cut.
        """
        limit = self.limits.max_model_len
        left = limit - prompt_len
        if left < (0 if wanted == 0 else 1):
            rest = "" if wanted == 0 else " and at least one must be left for the answer"
            message = f"the prompt has {prompt_len} tokens; this server's context is {limit} tokens{rest}"
            raise bad_request(message, prompt_param, "context_length_exceeded")
        if wanted is not None and wanted > left:
            message = (
                f"the prompt has {prompt_len} tokens and {param} is {wanted}: together more than this server's "
                f"context of {limit} tokens; at most {left} can be asked for"
            )
            raise bad_request(message, param, "context_length_exceeded")
        return left if wanted is None else wanted

    def check_capacity(self, num_prompts: int, n: int) -> None:
        """Errors: ApiError 400 for a request that could never be admitted whole."""
        capacity = self.info.max_running_requests + self.info.max_queued_requests
        if n * num_prompts > capacity:
            message = f"{num_prompts} prompts x n={n} are more answers than this server queues ({capacity})"
            raise bad_request(message, "prompt" if num_prompts > n else "n")


def sampling_params(body: SamplingFields, checker: Checker) -> SamplingParams:
    """Return what all choices of a request share; max_tokens, seed, choice and log-probs are set per choice."""
    checker.check_ids(body.stop_token_ids, "stop_token_ids")
    checker.check_ids(tuple(body.logit_bias), "logit_bias")
    end_ids = {*body.stop_token_ids, *(() if body.ignore_eos else checker.info.eos_token_ids)}
    if body.min_tokens and len(end_ids) >= checker.info.vocab_used:  # masked until then, and nothing else is left
        raise bad_request("stop_token_ids names every token: none is left for min_tokens", "stop_token_ids")
    temperature = 1.0 if body.temperature is None else body.temperature
    top_p = 1.0 if body.top_p is None else body.top_p
    if temperature < GREEDY_BELOW or top_p == 0:  # only the best token is left
        temperature, top_p = 0.0, 1.0
    return SamplingParams(
        max_tokens=0,
        min_tokens=body.min_tokens or 0,
        temperature=temperature,
        top_k=max(0, body.top_k or 0),
        top_p=top_p,
        min_p=body.min_p or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        logit_bias=body.logit_bias,
        stop_token_ids=body.stop_token_ids,
        eos_token_ids=() if body.ignore_eos else checker.info.eos_token_ids,
    )


def text_options(body: SamplingFields, *, track_offsets: bool) -> TextOptions:
    return TextOptions(
        stops=body.stop,
        include_stop_text=bool(body.include_stop_str_in_output),
        skip_special_tokens=True if body.skip_special_tokens is None else body.skip_special_tokens,
        min_tokens=body.min_tokens or 0,
        track_offsets=track_offsets,
    )


def check_fields_together(body: SamplingFields) -> None:
    """Errors: ApiError 400 for fields that are legal alone and not with each other."""
    options = body.stream_options
    if options is not None and not body.stream:
        raise bad_request("stream_options needs stream=true", "stream_options")
    if options is not None and options.continuous_usage_stats and not options.include_usage:
        raise bad_request("continuous_usage_stats needs include_usage=true", "stream_options.continuous_usage_stats")
    if body.min_tokens and body.max_tokens is not None and body.min_tokens > body.max_tokens:
        raise bad_request(f"min_tokens {body.min_tokens} is above max_tokens {body.max_tokens}", "min_tokens")


def _check_completion(body: CompletionRequest, checker: Checker) -> None:
    check_fields_together(body)
    n = body.n or 1
    if body.best_of is not None and body.best_of != n:
        raise bad_request(f"best_of must equal n ({n}): candidates that are not returned are not made", "best_of")
    if body.max_tokens == 0 and not body.echo and body.prompt_logprobs is None:
        raise bad_request("max_tokens 0 scores a prompt; it needs echo=true", "max_tokens")
    checker.check_capacity(len(body.prompt), n)


def completion_choices(body: CompletionRequest, checker: Checker, request_id: str, rng: random.Random) -> list[Choice]:
    """Return prompts x n choices, in the order of their index (prompt * n + choice). Errors: ApiError 400 or 404."""
    checker.check_model(body.model)
    _check_completion(body, checker)
    prompt_logprobs = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        prompt_logprobs = max(body.logprobs, prompt_logprobs or 0)
    params = msgspec.structs.replace(
        sampling_params(body, checker), logprobs=body.logprobs, prompt_logprobs=prompt_logprobs
    )
    pattern = Choice(
        0,
        AddRequest("", (), params),
        text_options(body, track_offsets=body.logprobs is not None),
        echo=bool(body.echo),
        logprobs=body.logprobs,
        prompt_logprobs=body.prompt_logprobs,
        tokens_as_ids=bool(body.return_tokens_as_token_ids),
    )
    cap = None if "max_tokens" in body.model_fields_set else DEFAULT_MAX_TOKENS
    add_special = bool(body.add_special_tokens)
    sized: list[tuple[tuple[int, ...], int]] = []
    for prompt in body.prompt:
        ids = checker.prompt_ids(prompt, add_special)
        left = checker.max_tokens(body.max_tokens, len(ids))
        sized.append((ids, left if cap is None else min(left, cap)))
    return expand(pattern, sized, body, request_id, rng)


def expand(
    pattern: Choice,
    prompts: Sequence[tuple[tuple[int, ...], int]],
    body: SamplingFields,
    request_id: str,
    rng: random.Random,
) -> list[Choice]:
    """Return n choices like `pattern` for each prompt and its number of tokens.

    A request without a seed draws one per prompt from `rng`; with a seed every prompt uses it, so a prompt's answers
    are the same alone and in a list.
    """
    choices: list[Choice] = []
    params = pattern.request.params
    for ids, max_tokens in prompts:
        if params.min_tokens > max_tokens:
            message = f"min_tokens {params.min_tokens} is above the {max_tokens} tokens that will be made at most"
            raise bad_request(message, "min_tokens")
        seed = rng.getrandbits(64) if body.seed is None else body.seed & _SEED_MASK
        for choice in range(body.n or 1):
            index = len(choices)
            own = msgspec.structs.replace(params, max_tokens=max_tokens, seed=seed, choice=choice)
            request = AddRequest(f"{request_id}-{index}", ids, own)
            choices.append(dataclasses.replace(pattern, index=index, request=request))
    return choices
