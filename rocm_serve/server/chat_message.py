"""From the text of a chat answer to its message: reasoning, content and tool calls, whole or as deltas."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence

from rocm_serve.server.pieces import Arguments, CallStart, Content, Piece, Reasoning, joined
from rocm_serve.server.reasoning import ReasoningParser
from rocm_serve.server.tools import ToolParser


class MessageParser:
    """Parses the answer of one choice. Without parsers all text is content."""

    def __init__(self, reasoning: ReasoningParser | None = None, tools: ToolParser | None = None) -> None:
        self.has_reasoning = reasoning is not None
        self._reasoning = reasoning
        self._tools = tools

    def feed(self, text: str) -> list[Piece]:
        """Return what the next text completes, neighbours joined."""
        if self._reasoning is None:
            return joined(self._calls(text))
        split = self._reasoning.feed(text)
        return joined([*_reasoning(split.reasoning), *self._calls(split.content)])

    def finish(self, *, cut: bool) -> list[Piece]:
        """Return what was kept back. `cut`: it was not the model that ended the answer."""
        pieces: list[Piece] = []
        if self._reasoning is not None:
            split = self._reasoning.finish()
            pieces += [*_reasoning(split.reasoning), *self._calls(split.content)]
        if self._tools is not None:
            pieces += self._tools.finish(cut=cut)
        return joined(pieces)

    def finish_reason(self, reason: str) -> str:
        """Return the reason to show: an answer that stopped after whole calls waits for their results."""
        tools = self._tools
        return "tool_calls" if reason == "stop" and tools and tools.num_calls and not tools.in_call else reason

    def _calls(self, text: str) -> list[Piece]:
        if self._tools is not None:
            return self._tools.feed(text)
        return [Content(text)] if text else []


MakeMessageParser = Callable[[], MessageParser]


def _reasoning(text: str) -> list[Piece]:
    return [Reasoning(text)] if text else []


def delta(piece: Piece) -> dict[str, object]:
    """Return the `delta` of a chunk. It has one call at most: there are clients that read only the first."""
    match piece:
        case Reasoning(text):
            return {"reasoning_content": text}
        case Content(text):
            return {"content": text}
        case CallStart(index, name):
            return {"tool_calls": [{"index": index, **_call(name, "")}]}
        case Arguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def message(pieces: Sequence[Piece], *, has_reasoning: bool) -> dict[str, object]:
    """Return the `message` of a whole answer. One of reasoning or calls alone has content null."""
    content = "".join(piece.text for piece in pieces if isinstance(piece, Content))
    reasoning = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
    names = [piece.name for piece in pieces if isinstance(piece, CallStart)]
    arguments = [""] * len(names)
    for piece in pieces:
        if isinstance(piece, Arguments):
            arguments[piece.index] += piece.text
    shown: dict[str, object] = {"role": "assistant", "content": content, "refusal": None}
    if not content and (reasoning or names):
        shown["content"] = None
    if has_reasoning:
        shown["reasoning_content"] = reasoning or None
    if names:
        shown["tool_calls"] = [_call(name, text) for name, text in zip(names, arguments, strict=True)]
    return shown


def _call(name: str, arguments: str) -> dict[str, object]:
    return {
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
