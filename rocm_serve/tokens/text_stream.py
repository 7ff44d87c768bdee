"""From the tokens of one answer to the text that may be shown: detokeniser and stop strings as one step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rocm_serve.tokens.detokenizer import Detokenizer
from rocm_serve.tokens.stops import StopMatcher
from rocm_serve.tokens.tokenizer import Tokenizer


@dataclass(frozen=True)
class TextOptions:
    """How the text of an answer is made."""

    stops: tuple[str, ...] = ()
    include_stop_text: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0  # a stop string that is complete within so many tokens does not count
    track_offsets: bool = False


class TextStep(NamedTuple):
    """`used`: how many of the pushed tokens belong to the answer. `offsets`: where the text of each of them begins."""

    text: str
    used: int
    matched: str | None = None
    offsets: Sequence[int] = ()


class TextStream:
    """The text of one answer, in parts. The parts joined do not depend on how the tokens were grouped."""

    def __init__(self, tokenizer: Tokenizer, options: TextOptions) -> None:
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=options.skip_special_tokens)
        self._matcher = StopMatcher(options.stops, include_stop_text=options.include_stop_text)
        self._options = options
        self._plain = not options.stops and not options.track_offsets
        self._num_tokens = 0
        self._decoded = 0  # characters decoded, shown or kept back; an echoed prompt counts
        self.shown = 0  # characters given out

    @property
    def holds_text(self) -> bool:
        return self._matcher.holds_text

    def prime(self, prompt: Sequence[int]) -> None:
        """Begin after a prompt that is not shown."""
        self._detokenizer.prime(prompt)

    def echo(self, prompt: Sequence[int]) -> TextStep:
        """Begin with the prompt itself: its text as the model saw it (after the tokenizer's normaliser)."""
        parts: list[str] = []
        offsets: list[int] = []
        for token in prompt:
            offsets.append(self._decoded)
            part = self._detokenizer.feed_prompt(token)
            self._decoded += len(part)
            parts.append(part)
        self.shown = self._decoded
        return TextStep("".join(parts), len(prompt), offsets=offsets)

    def push(self, tokens: Sequence[int], *, hide_last: bool = False) -> TextStep:
        """Take the next tokens. `hide_last`: the last one ended the answer and has no text of its own."""
        if self._plain:
            self._num_tokens += len(tokens)
            text = self._detokenizer.feed(tokens[:-1] if hide_last else tokens)
            self._decoded += len(text)
            self.shown = self._decoded
            return TextStep(text, len(tokens))
        return self._push_singly(tokens, hide_last)

    def finish(self) -> TextStep:
        """End the answer: what was kept back comes out, U+FFFD for an unfinished character."""
        step = self._matcher.feed(self._detokenizer.flush(), armed=self._num_tokens > self._options.min_tokens)
        text = step.text if step.matched is not None else step.text + self._matcher.flush()
        self.shown += len(text)
        return TextStep(text, 0, step.matched)

    def _push_singly(self, tokens: Sequence[int], hide_last: bool) -> TextStep:
        shown: list[str] = []
        offsets: list[int] = []
        matched: str | None = None
        for place, token in enumerate(tokens):
            self._num_tokens += 1
            offsets.append(self._decoded)
            if hide_last and place == len(tokens) - 1:
                break
            text = self._detokenizer.feed((token,))
            self._decoded += len(text)
            step = self._matcher.feed(text, armed=self._num_tokens > self._options.min_tokens)
            shown.append(step.text)
            if step.matched is not None:
                matched = step.matched
                break
        joined = "".join(shown)
        self.shown += len(joined)
        return TextStep(joined, len(offsets), matched, offsets)
