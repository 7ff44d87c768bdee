"""Cut a text in pieces, as a stream does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hypothesis import strategies as st


def cut(text: str, places: Sequence[int]) -> list[str]:
    """Return the pieces of `text` between `places`, some of them empty."""
    edges = [0, *sorted(min(place, len(text)) for place in places), len(text)]
    return [text[begin:end] for begin, end in zip(edges, edges[1:], strict=False)]


def every_cut(text: str) -> Iterator[list[str]]:
    """Yield the whole, every cut in two, and pieces of 1 to 4 characters."""
    yield [text]
    for place in range(1, len(text)):
        yield [text[:place], text[place:]]
    for width in range(1, 5):
        yield [text[place : place + width] for place in range(0, len(text), width)]


def soup(*parts: str, more: str = " \n<>/=abé🙂") -> st.SearchStrategy[str]:
    """Texts of these parts, pieces of them, and other characters."""
    pieces = st.sampled_from(parts).flatmap(lambda part: st.integers(1, len(part)).map(lambda size: part[:size]))
    words = st.one_of(st.sampled_from(parts), pieces, st.text(more, max_size=4))
    return st.lists(words, max_size=20).map("".join)


PLACES = st.lists(st.integers(0, 200), max_size=12)
