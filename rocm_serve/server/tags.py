"""Find tags in a text that grows, whatever the cuts between its parts."""

from __future__ import annotations

import re


class Tags:
    """A few literal strings. The earliest counts; of two at the same place, the longer."""

    def __init__(self, *tags: str) -> None:
        assert all(tags), "an empty tag is everywhere"
        self._tags = tags
        self._longest = max(map(len, tags))
        self._firsts = frozenset(tag[0] for tag in tags)
        self._pattern = re.compile("|".join(map(re.escape, sorted(tags, key=len, reverse=True))))

    def first(self, text: str, start: int = 0) -> tuple[int, str] | None:
        """Return where the first tag at or after `start` begins, and the tag."""
        found = self._pattern.search(text, start)
        return None if found is None else (found.start(), found.group())

    def held_from(self, text: str, start: int = 0) -> int:
        """Return where the longest end of `text` begins that more text may turn into a tag; len(text) if none may."""
        for place in range(max(start, len(text) - self._longest + 1), len(text)):
            if text[place] in self._firsts:
                tail = text[place:]
                if any(tag.startswith(tail) for tag in self._tags):
                    return place
        return len(text)
