"""Answers that no working model gives: one token again and again, or a phrase in a loop. Pure."""

from __future__ import annotations

from typing import Final

_LOOP_CHARS: Final = 48  # a tail of this length that repeats its own beginning is a loop
_LOOP_TIMES: Final = 4
_SHORT_CHARS: Final = 8  # a whole answer of this length may be one token of one or two characters
_SHORT_PERIOD: Final = 2


def is_degenerate(text: str) -> bool:
    """Say whether an answer is one short unit repeated, or ends in a loop."""
    stripped = text.strip()
    if len(stripped) < _SHORT_CHARS:
        return False
    borders = _borders(stripped[::-1])
    if len(stripped) - borders[-1] <= _SHORT_PERIOD:
        return True
    lengths = range(_LOOP_CHARS, len(stripped) + 1)
    return any(_LOOP_TIMES * (length - borders[length - 1]) <= length for length in lengths)


def _borders(text: str) -> list[int]:
    """Return for every prefix the length of its longest border (Knuth, Morris, Pratt): length - border is a period."""
    found = [0] * len(text)
    for i in range(1, len(text)):
        length = found[i - 1]
        while length and text[i] != text[length]:
            length = found[length - 1]
        found[i] = length + (text[i] == text[length])
    return found
