"""Qwen3's reasoning: `<think>` ... `</think>`, of which the prompt usually holds the first tag."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from rocm_serve.server.tags import Tags

_BEGIN, _END = "<think>", "</think>"
# Models call a tool while they still reason. The bare tag does not count: reasoning may speak of it.
_CALLS = ("<tool_call>\n<function=", "<tool_call><function=")


class Split(NamedTuple):
    """New text of both kinds. When neither is empty, the reasoning comes first."""

    reasoning: str = ""
    content: str = ""


Step = Callable[[], Split]


class Qwen3Reasoning:
    """Splits one answer. The newlines next to a tag belong to the tag; all other text comes out as it is.

    A prompt that ends in `<think>` leaves the answer inside reasoning (a `<think>` that the model repeats is dropped).
    One that ends in `</think>` asks for no reasoning: all is content. After any other prompt the answer reasons if it
    begins with `<think>`.
    """

    def __init__(self, prompt: str, *, calls_end_it: bool = False) -> None:
        prompt = prompt.rstrip()
        self._opened = prompt.endswith(_BEGIN)
        self._step: Step = self._pass if prompt.endswith(_END) else self._begin
        self._ends = Tags(_END, *(_CALLS if calls_end_it else ()))
        self._buffer = ""

    def feed(self, text: str) -> Split:
        self._buffer += text
        return self._step()

    def finish(self) -> Split:
        rest, self._buffer = self._buffer, ""
        if self._step == self._begin and not self._opened:
            return Split(content=rest)
        if self._step in (self._begin, self._trim):
            return Split(reasoning=rest.lstrip("\n"))
        return Split(reasoning=rest) if self._step == self._reason else Split()

    def _begin(self) -> Split:
        """Before anything but white space has come."""
        text = self._buffer.lstrip()
        if text != _BEGIN and _BEGIN.startswith(text):  # nothing yet, or a part of the tag
            return Split()
        if text.startswith(_BEGIN):
            self._buffer = text.removeprefix(_BEGIN)
            return self._go(self._trim)
        return self._go(self._trim if self._opened else self._pass)

    def _trim(self) -> Split:
        """Before the first character of the reasoning."""
        self._buffer = self._buffer.lstrip("\n")
        return self._go(self._reason) if self._buffer else Split()

    def _reason(self) -> Split:
        found = self._ends.first(self._buffer)
        if found is None:
            upto = self._ends.held_from(self._buffer)
            text = self._buffer[:upto].rstrip("\n")
            self._buffer = self._buffer[len(text) :]
            return Split(reasoning=text)
        start, tag = found
        text = self._buffer[:start].rstrip("\n")
        self._buffer = self._buffer[start:].removeprefix(_END)
        return Split(text, self._go(self._after if tag == _END else self._pass).content)

    def _after(self) -> Split:
        """Before the first character of the answer."""
        self._buffer = self._buffer.lstrip("\n")
        return self._go(self._pass) if self._buffer else Split()

    def _pass(self) -> Split:
        text, self._buffer = self._buffer, ""
        return Split(content=text)

    def _go(self, step: Step) -> Split:
        self._step = step
        return step()
