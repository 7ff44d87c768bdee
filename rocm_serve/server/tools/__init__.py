"""Parsers that find tool calls in the text of an answer, by the name that --tool-call-parser takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from rocm_serve.server.pieces import Piece
from rocm_serve.server.tools.qwen3_coder import Qwen3CoderParser


class ToolParser(Protocol):
    """Parses one answer. The pieces, neighbours joined, do not depend on how the text was cut."""

    @property
    def num_calls(self) -> int:
        """Calls begun so far."""
        ...

    @property
    def in_call(self) -> bool:
        """The last call has not ended: its arguments are not whole. At the end of an answer: it was cut off."""
        ...

    def feed(self, text: str) -> list[Piece]: ...

    def finish(self, *, cut: bool) -> list[Piece]:
        """Return what was kept back. `cut`: the answer was ended from outside (its length, a stop string)."""
        ...


class MakeToolParser(Protocol):
    def __call__(self, tools: Sequence[Mapping[str, object]], *, parallel: bool) -> ToolParser:
        """Return a parser for an answer that may call `tools`. Not `parallel`: at most one call is taken."""
        ...


TOOL_PARSERS: Mapping[str, MakeToolParser] = {"qwen3_coder": Qwen3CoderParser}
TOOL_TAGS: Mapping[str, tuple[str, ...]] = {"qwen3_coder": ("<tool_call>", "</tool_call>")}  # must be in the text
