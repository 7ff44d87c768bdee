"""Parsers that tell a model's reasoning from its answer, by the name that --reasoning-parser takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from rocm_serve.server.reasoning.qwen3 import Qwen3Reasoning, Split


class ReasoningParser(Protocol):
    """Splits the text of one answer. What comes out, joined, does not depend on how the text was cut."""

    def feed(self, text: str) -> Split: ...

    def finish(self) -> Split:
        """Return what was kept back; the answer is over."""
        ...


class MakeReasoningParser(Protocol):
    def __call__(self, prompt: str, *, calls_end_it: bool) -> ReasoningParser:
        """Return a parser for an answer to `prompt`. `calls_end_it`: a tool call ends reasoning that has no end."""
        ...


REASONING_PARSERS: Mapping[str, MakeReasoningParser] = {"qwen3": Qwen3Reasoning}
REASONING_TAGS: Mapping[str, tuple[str, ...]] = {"qwen3": ("<think>", "</think>")}  # must be in the text
