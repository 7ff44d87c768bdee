from __future__ import annotations

import re
from collections.abc import Sequence
from typing import get_args

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rocm_serve.config.schema import ReasoningParserName
from rocm_serve.server.reasoning import REASONING_PARSERS, REASONING_TAGS
from rocm_serve.server.reasoning.qwen3 import Qwen3Reasoning
from tests.server.cuts import PLACES, cut, every_cut, soup

OPEN = "<|im_start|>assistant\n<think>\n"
CLOSED = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
BARE = "<|im_start|>assistant\n"
CALL = "<tool_call>\n<function="


def split(pieces: Sequence[str], prompt: str = OPEN, *, calls_end_it: bool = False) -> tuple[str, str]:
    parser = Qwen3Reasoning(prompt, calls_end_it=calls_end_it)
    found = [*(parser.feed(piece) for piece in pieces), parser.finish()]
    answering = [place for place, one in enumerate(found) if one.content]
    assert not answering or not any(one.reasoning for one in found[answering[0] + 1 :])
    return "".join(one.reasoning for one in found), "".join(one.content for one in found)


def by_pattern(text: str, prompt: str, calls_end_it: bool) -> tuple[str, str]:
    """The same with regular expressions over the whole text."""
    if prompt == CLOSED:
        return "", text
    begun = re.match(r"\s*<think>", text)
    if prompt == BARE and not begun:
        return "", text
    text = text[begun.end() :] if begun else text
    end = re.search(r"\n*</think>\n*" + (r"|\n*(?=<tool_call>\n?<function=)" if calls_end_it else ""), text)
    if end is None:
        return text.lstrip("\n"), ""
    return text[: end.start()].lstrip("\n"), text[end.end() :]


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("two and two\n</think>\n\nfour\n", "two and two", "four\n"),
        ("<think>\ntwo\n</think>four", "two", "four"),
        ("\n</think>\n\nfour", "", "four"),
        ("</think>", "", ""),
        ("cut off\n", "cut off\n", ""),
        ("cut </thin", "cut </thin", ""),
        ("a < b\n\n c </think> d </think> e", "a < b\n\n c ", " d </think> e"),
        ("think <tool_call> ", "think <tool_call> ", ""),
        ("", "", ""),
    ],
)
def test_the_split_is_the_same_for_every_cut(text: str, reasoning: str, content: str) -> None:
    for pieces in every_cut(text):
        assert split(pieces) == (reasoning, content)


def test_a_prompt_with_a_closed_block_asks_for_no_reasoning() -> None:
    for pieces in every_cut("<think>four</think>"):
        assert split(pieces, CLOSED) == ("", "<think>four</think>")


def test_after_a_prompt_without_a_block_the_answer_may_open_one() -> None:
    for pieces in every_cut("\n<think>\ntwo\n</think>\n\nfour"):
        assert split(pieces, BARE) == ("two", "four")
    for pieces in every_cut("\nfour</think>"):
        assert split(pieces, BARE) == ("", "\nfour</think>")
    assert split([" <thi"], BARE) == ("", " <thi")


def test_a_call_ends_reasoning_that_has_no_end_if_there_are_tools() -> None:
    text = f"I speak of <tool_call> and call\n{CALL}f>\n</function>"
    for pieces in every_cut(text):
        expected = "I speak of <tool_call> and call", f"{CALL}f>\n</function>"
        assert split(pieces, calls_end_it=True) == expected
        assert split(pieces) == (text, "")


def test_reasoning_leaves_as_it_comes() -> None:
    parser = Qwen3Reasoning(OPEN)
    assert [parser.feed(piece).reasoning for piece in ("\n", "a", "b\n", "c<", "d", "e</think")] == [
        "", "a", "b", "\nc", "<d", "e",
    ]  # fmt: skip
    assert parser.feed("> f").content == " f"


@settings(max_examples=300)
@given(
    soup("<think>", "</think>", CALL, "<tool_call>", "\n"), PLACES, st.sampled_from([OPEN, CLOSED, BARE]), st.booleans()
)
@example("\n\n</think>\n\n\n", [3, 4, 12], OPEN, True)
def test_any_text_cut_anywhere_is_split_as_a_pattern_splits_it(
    text: str, places: list[int], prompt: str, calls_end_it: bool
) -> None:
    expected = by_pattern(text, prompt, calls_end_it)
    assert split([text], prompt, calls_end_it=calls_end_it) == expected
    assert split(cut(text, places), prompt, calls_end_it=calls_end_it) == expected
    assert split(list(text), prompt, calls_end_it=calls_end_it) == expected


def test_the_table_has_the_names_that_the_configuration_accepts() -> None:
    assert set(REASONING_PARSERS) == set(REASONING_TAGS) == set(get_args(ReasoningParserName))
