from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rocm_serve.server.tags import Tags


def test_the_earliest_tag_counts_and_the_longer_of_two() -> None:
    tags = Tags("<b>", "\n<b>", "<c>")
    assert tags.first("x\n<b><c>") == (1, "\n<b>")
    assert tags.first("x\n<b><c>", 2) == (2, "<b>")
    assert tags.first("x<") is None


def test_only_what_may_become_a_tag_is_held() -> None:
    tags = Tags("</think>", "<tool>")
    assert [tags.held_from(text) for text in ("a</thin", "a<<", "a<x", "", "a</think", "a<to")] == [1, 2, 3, 0, 1, 1]


@given(st.text("<a>\n", max_size=12), st.integers(0, 12), st.sets(st.text("<a>\n", min_size=1, max_size=4), min_size=1))
def test_both_agree_with_their_definition(text: str, start: int, tags: set[str]) -> None:
    start = min(start, len(text))
    hits = [(place, tag) for tag in tags for place in range(start, len(text)) if text.startswith(tag, place)]
    expected = min(hits, key=lambda hit: (hit[0], -len(hit[1])), default=None)
    assert Tags(*tags).first(text, start) == expected
    may = [place for place in range(start, len(text)) if any(tag.startswith(text[place:]) for tag in tags)]
    assert expected is not None or Tags(*tags).held_from(text, start) == min(may, default=len(text))


def test_tags_are_literal() -> None:
    assert Tags("a.c", "(").first("abc(") == (3, "(")
