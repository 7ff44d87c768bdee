"""One choice while it is being answered: engine outputs in, parts of the answer out. The same for both modes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from rocm_serve.messages import Output
from rocm_serve.server.choices import Choice
from rocm_serve.server.errors import ApiError
from rocm_serve.server.logprobs import Scored, prompt_logprob_object
from rocm_serve.tokens.text_stream import TextStep, TextStream
from rocm_serve.tokens.tokenizer import Tokenizer
from rocm_serve.types import FinishReason, TokenLogprob

PromptLogprobs = list[dict[str, dict[str, object]] | None]


@dataclass(slots=True)
class Part:
    """What one engine output adds to a choice. The last part has `finish_reason`."""

    index: int
    text: str
    scored: list[Scored] | None = None  # None when log-probs were not asked for, or none are out yet
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: PromptLogprobs | None = None


class Answer:
    """Turns the outputs of one request into parts. `num_tokens` counts the tokens of the answer so far."""

    def __init__(self, choice: Choice, tokenizer: Tokenizer) -> None:
        self.choice = choice
        self.num_tokens = 0
        self.finish_reason: str | None = None
        self._tokenizer = tokenizer
        self._stream = TextStream(tokenizer, choice.text)
        self._prompt_entries: list[TokenLogprob] = []
        self._waiting: deque[Scored] = deque()
        self._started = False
        self._plain = False  # begun, and nothing but text is wanted

    def feed(self, output: Output) -> Part | None:
        """Take one output. Returns None when there is nothing to show yet.

        Errors: ApiError when the engine gave up on the request.
        """
        if self._plain and output.finish_reason is None:
            return self._feed_plain(output)
        if output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
            raise engine_error(output)
        self._prompt_entries += output.prompt_logprobs
        if not output.tokens and output.finish_reason is None:
            return None
        part = Part(self.choice.index, "")
        if not self._started:
            part.text = self._begin(part)
        self._add_tokens(output, part)
        if output.finish_reason is not None and part.finish_reason is None:
            self._finish(output, part)
        self.finish_reason = part.finish_reason
        part.scored = self._released(final=part.finish_reason is not None)
        if part.text or part.scored is not None or part.finish_reason is not None:
            return part
        return None

    def _feed_plain(self, output: Output) -> Part | None:
        """Take an output of tokens in the middle of an answer: what nearly every output is."""
        step = self._stream.push(output.tokens)
        self.num_tokens += step.used
        if step.matched is not None:
            self.finish_reason = "stop"
            return Part(self.choice.index, step.text, None, "stop", step.matched)
        return Part(self.choice.index, step.text) if step.text else None

    def _begin(self, part: Part) -> str:
        self._started = True
        self._plain = self.choice.logprobs is None
        choice, prompt = self.choice, self.choice.request.prompt
        if choice.prompt_logprobs is not None:
            width = choice.prompt_logprobs
            entries = self._prompt_entries
            part.prompt_logprobs = [None, *(prompt_logprob_object(self._tokenizer, e, width) for e in entries)]
        if not choice.echo:
            self._stream.prime(prompt)
            return ""
        step = self._stream.echo(prompt)
        if choice.logprobs is not None:
            assert len(self._prompt_entries) == len(prompt) - 1, "a prompt log-prob for every token but the first"
            self._queue(prompt, (None, *self._prompt_entries), step)
        self._prompt_entries = []
        return step.text

    def _add_tokens(self, output: Output, part: Part) -> None:
        hide_last = output.stop_token is not None and not self.choice.text.include_stop_text
        step = self._stream.push(output.tokens, hide_last=hide_last)
        self.num_tokens += step.used
        part.text += step.text
        if self.choice.logprobs is not None:
            self._queue(output.tokens, output.logprobs, step)
        if step.matched is not None:
            part.finish_reason, part.stop_reason = "stop", step.matched

    def _finish(self, output: Output, part: Part) -> None:
        step = self._stream.finish()
        part.text += step.text
        part.finish_reason = "stop" if output.finish_reason is FinishReason.STOP else "length"
        if step.matched is not None:
            part.finish_reason, part.stop_reason = "stop", step.matched
        elif output.stop_token in self.choice.request.params.stop_token_ids:
            part.stop_reason = output.stop_token

    def _queue(self, tokens: Sequence[int], entries: Sequence[TokenLogprob | None], step: TextStep) -> None:
        for place in range(step.used):
            self._waiting.append(Scored(tokens[place], entries[place], step.offsets[place]))

    def _released(self, *, final: bool) -> list[Scored] | None:
        """Give out the entries whose text is out; those of text that a stop string cut away point at the end."""
        shown = self._stream.shown
        scored: list[Scored] = []
        while self._waiting and (final or not self._stream.holds_text or self._waiting[0].offset < shown):
            token, entry, offset = self._waiting.popleft()
            scored.append(Scored(token, entry, min(offset, shown)))
        return scored or None


def engine_error(output: Output) -> ApiError:
    """Return the error that a request ends with when the engine dropped it."""
    message = output.error or "the engine stopped before the answer was complete"
    if output.finish_reason is FinishReason.ABORT:
        return ApiError(503, message, code="request_aborted")
    return ApiError(500, message, code="engine_error")
