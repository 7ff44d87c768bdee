from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocm_serve.tokens.stops import StopMatcher

TEXT = st.text("abc", max_size=25)
STOPS = st.lists(st.text("abc", min_size=1, max_size=4), max_size=3).map(tuple)


def run(parts: list[str], stops: tuple[str, ...], include: bool = False) -> tuple[list[str], str | None]:
    matcher = StopMatcher(stops, include_stop_text=include)
    shown = []
    for part in parts:
        step = matcher.feed(part)
        shown.append(step.text)
        if step.matched is not None:
            return shown, step.matched
    return [*shown, matcher.flush()], None


def judge(text: str, stops: tuple[str, ...], include: bool) -> tuple[str, str | None]:
    """Character by character: the first end of a stop string, the longest of those that end there."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@given(TEXT, STOPS, st.lists(st.integers(0, 25), max_size=8), st.booleans())
def test_any_cut_of_any_text_gives_the_text_up_to_the_first_complete_stop(
    text: str, stops: tuple[str, ...], cuts: list[int], include: bool
) -> None:
    places = sorted({0, len(text), *(place % (len(text) + 1) for place in cuts)})
    parts = [text[a:b] for a, b in zip(places, places[1:], strict=False)]
    shown, matched = run(parts, stops, include)
    assert ("".join(shown), matched) == judge(text, stops, include)


@given(TEXT, STOPS)
def test_only_a_possible_beginning_is_kept_back(text: str, stops: tuple[str, ...]) -> None:
    matcher = StopMatcher(stops)
    shown = ""
    for count, char in enumerate(text, 1):
        step = matcher.feed(char)
        shown += step.text
        if step.matched is not None:
            return
        held = text[len(shown) : count]
        assert text[:count] == shown + held
        assert held == "" or any(stop.startswith(held) for stop in stops)
        assert matcher.holds_text == bool(held)


def test_a_stop_string_over_three_parts_leaks_nothing() -> None:
    assert run(["one Que", "sti", "on: two"], ("Question:",)) == (["one ", "", ""], "Question:")


def test_a_false_alarm_comes_out_at_once() -> None:
    assert run(["x</thi", "ng> y"], ("</think>",)) == (["x", "</thing> y", ""], None)


def test_of_two_stops_one_prefix_of_the_other_the_shorter_is_complete_first() -> None:
    assert run(["xabc"], ("abc", "ab")) == (["x"], "ab")
    assert run(["xab", "c"], ("abc", "ab")) == (["x"], "ab")


@pytest.mark.parametrize("parts", [["xab", "cab"], ["xabcab"], list("xabcab")])
def test_a_match_that_ends_in_an_unarmed_part_does_not_count(parts: list[str]) -> None:
    matcher = StopMatcher(("abca",))
    shown = ""
    seen = 0
    for part in parts:
        seen += len(part)
        step = matcher.feed(part, armed=seen > 6)
        assert step.matched is None
        shown += step.text
    assert shown + matcher.flush() == "xabcab"


def test_a_stop_begun_unarmed_counts_when_it_ends_armed() -> None:
    matcher = StopMatcher(("abc",))
    assert matcher.feed("xab", armed=False).text == "x"
    step = matcher.feed("c")
    assert (step.text, step.matched) == ("", "abc")


def test_without_stops_everything_passes() -> None:
    assert run(["a", "b"], ()) == (["a", "b", ""], None)
