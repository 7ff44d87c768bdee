"""What the parsers find in a chat answer, in the order of its text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """Text that is neither reasoning nor a call."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins; `index` counts the calls of one answer from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """The next part of the JSON text of a call's arguments."""

    index: int
    text: str


Piece = Reasoning | Content | CallStart | Arguments


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """Put neighbours of one kind, and of one call, together."""
    found: list[Piece] = []
    for piece in pieces:
        last = found[-1] if found else None
        match last, piece:
            case (Reasoning(before), Reasoning(text)):
                found[-1] = Reasoning(before + text)
            case (Content(before), Content(text)):
                found[-1] = Content(before + text)
            case (Arguments(one, before), Arguments(other, text)) if one == other:
                found[-1] = Arguments(one, before + text)
            case _:
                found.append(piece)
    return found
