from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rocm_serve.checkpoint
from rocm_serve.config.schema import ToolCallParserName
from rocm_serve.server.pieces import Arguments, CallStart, Content, Piece, joined
from rocm_serve.server.tools import TOOL_PARSERS, TOOL_TAGS
from rocm_serve.server.tools.qwen3_coder import Qwen3CoderParser
from rocm_serve.server.tools.schema_values import json_value
from tests.server.cuts import PLACES, cut, every_cut, soup

PROPERTIES = {
    "city": {"type": "string"},
    "days": {"type": "integer"},
    "warm": {"type": "boolean"},
    "where": {"type": "object"},
    "note": {"type": ["string", "null"]},
    "any": {},
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": PROPERTIES}}},
    {"type": "function", "function": {"name": "now"}},
]
TEMPLATE = (Path(rocm_serve.checkpoint.__file__).parent / "synthetic_template.jinja").read_text(encoding="utf-8")


@dataclass
class Read:
    """An answer put together. Arguments stay text."""

    content: str = ""
    calls: list[list[str]] = field(default_factory=list)
    whole: bool = True  # no call is left open

    @classmethod
    def of(cls, pieces: Iterable[Piece], whole: bool) -> Read:
        found = cls(whole=whole)
        for piece in pieces:
            if isinstance(piece, Content):
                found.content += piece.text
            elif isinstance(piece, CallStart):
                assert piece.index == len(found.calls)
                found.calls.append([piece.name, ""])
            else:
                assert isinstance(piece, Arguments) and piece.index == len(found.calls) - 1
                found.calls[-1][1] += piece.text
        return found


def read(pieces: Sequence[str], *, cut_off: bool = False, parallel: bool = True) -> Read:
    parser = Qwen3CoderParser(TOOLS, parallel=parallel)
    found = [piece for text in pieces for piece in parser.feed(text)] + parser.finish(cut=cut_off)
    return Read.of(found, not parser.in_call)


def call(name: str, *parameters: tuple[str, str]) -> str:
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


PARIS = call("weather", ("city", "Paris"), ("days", "2"))
ARGUMENTS = '{"city": "Paris", "days": 2}'


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("no call at all \n", "no call at all \n", []),
        (PARIS, "", [["weather", ARGUMENTS]]),
        (f"I look.\n\n{PARIS}\n", "I look.", [["weather", ARGUMENTS]]),
        (f"\n{PARIS}\nDone.\n", "Done.", [["weather", ARGUMENTS]]),
        (f"a\n{PARIS}\n{call('now')} b", "a\n\n b", [["weather", ARGUMENTS], ["now", "{}"]]),
        (call("unknown", ("x", "1")), "", [["unknown", '{"x": "1"}']]),
        (call("weather", ("city", "12"), ("unknown", "3")), "", [["weather", '{"city": "12", "unknown": "3"}']]),
        (call("weather", ("where", '{"a": ["é", 1]}')), "", [["weather", '{"where": {"a": ["é", 1]}}']]),
        (call("weather", ("note", "null"), ("any", "null")), "", [["weather", '{"note": null, "any": "null"}']]),
        (call("weather", ("note", "nullify")), "", [["weather", '{"note": "nullify"}']]),
        (call("weather", ("city", "\na\n\nb\n")), "", [["weather", json.dumps({"city": "\na\n\nb\n"})]]),
        (call("weather", ("city", "")), "", [["weather", '{"city": ""}']]),
        (call("weather", ("city", 'a "b" </p> <parameter=x> </function>')), "",
         [["weather", json.dumps({"city": 'a "b" </p> <parameter=x> </function>'})]]),
        ("<tool_call><function=weather><parameter=days>2</parameter></function></tool_call>", "",
         [["weather", '{"days": 2}']]),
        # An end tag that is missing is put where the next tag is.
        ("<tool_call>\n<function=weather>\n<parameter=city>\nParis\n<parameter=days>\n2\n</function>\n</tool_call>", "",
         [["weather", ARGUMENTS]]),
        ("<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</tool_call>", "",
         [["weather", '{"city": "Paris"}']]),
        ("<tool_call>\n<function=now>\n<tool_call>\n<function=now>\n</function>", "", [["now", "{}"], ["now", "{}"]]),
        ("<tool_call>\n<function=now>\n</function>\n<function=now>\n</function>\n</tool_call>", "",
         [["now", "{}"], ["now", "{}"]]),
        ("<tool_call>\n<function=now>\n</function>\nafter", "after", [["now", "{}"]]),
        ("<tool_call>\n<function=weather>\n<parameter=city>\nPar\n", "", [["weather", '{"city": "Par"}']]),
        ("<tool_call>\n<function=weather>\n<parameter=days>\n2", "", [["weather", '{"days": 2}']]),
        ("<tool_call>\n<function=now>", "", [["now", "{}"]]),
        # What is no call is never lost.
        ("<tool_call>\n{\"name\": \"now\"}\n</tool_call>", "<tool_call>\n{\"name\": \"now\"}\n</tool_call>", []),
        ("<tool_call>\n<function=>", "<tool_call>\n<function=>", []),
        ("<tool_call>\n<function=a<b>", "<tool_call>\n<function=a<b>", []),
        (f"<tool_call>\n<function={'x' * 300}>", f"<tool_call>\n<function={'x' * 300}>", []),
        ("<tool_call> <fun", "<tool_call> <fun", []),
        ("<tool_call>\n<tool_call>\n<function=now>\n</function>", "<tool_call>", [["now", "{}"]]),
        ("<function=now>\n</function>", "<function=now>\n</function>", []),
        ("</tool_call> <tool_c", "</tool_call> <tool_c", []),
        ("<tool_call>\n<function=now>\nstray\n</function>\n</tool_call>", "stray", [["now", "{}"]]),
        (call("weather", ("city", "a"), ("city", "b")), "<parameter=city>\nb\n</parameter>",
         [["weather", '{"city": "a"}']]),
        ("<tool_call>\n<function=now>\n<parameter=>\n1\n</parameter>\n</function>", "<parameter=>\n1\n</parameter>",
         [["now", "{}"]]),
    ],
)  # fmt: skip
def test_an_answer_is_read_alike_for_every_cut(text: str, content: str, calls: list[list[str]]) -> None:
    for pieces in every_cut(text):
        assert read(pieces) == Read(content, calls)


@pytest.mark.parametrize(
    ("text", "content", "arguments"),
    [
        ("<tool_call>\n<function=weather>\n", "", ""),
        ("<tool_call>\n<function=weather>\n<parameter=ci", "<parameter=ci", ""),
        ("<tool_call>\n<function=weather>\n<parameter=city>", "", '{"city": '),
        ("<tool_call>\n<function=weather>\n<parameter=city>\nPar", "", '{"city": "Par'),
        ("<tool_call>\n<function=weather>\n<parameter=days>\n2", "", '{"days": 2'),
        ("<tool_call>\n<function=weather>\n<parameter=days>\n2\n</parameter>\n", "", '{"days": 2'),
    ],
)
def test_a_call_that_was_cut_off_keeps_unfinished_json(text: str, content: str, arguments: str) -> None:
    for pieces in every_cut(text):
        assert read(pieces, cut_off=True) == Read(content, [["weather", arguments]], whole=False)
        with pytest.raises(ValueError):
            json.loads(arguments)


def test_an_answer_cut_off_after_a_call_is_whole() -> None:
    for pieces in every_cut(f"{PARIS}\n<tool_"):
        assert read(pieces, cut_off=True) == Read("<tool_", [["weather", ARGUMENTS]])


def test_without_parallel_calls_the_second_stays_text() -> None:
    for pieces in every_cut(f"{PARIS}\n{call('now')}"):
        assert read(pieces, parallel=False) == Read(call("now"), [["weather", ARGUMENTS]])
    inner = "<tool_call>\n<function=now>\n</function>\n<function=now>\n</function>\n</tool_call>"
    for pieces in every_cut(inner):
        found = read(pieces, parallel=False)
        assert found == Read("<function=now>\n</function>\n</tool_call>", [["now", "{}"]])


def test_the_name_comes_first_and_a_string_while_it_is_written() -> None:
    parser = Qwen3CoderParser(TOOLS)
    steps = [
        ("<tool_call>\n<function=weather", []),
        (">", [CallStart(0, "weather")]),
        ("\n<parameter=city>\nPa", [Arguments(0, '{"city": '), Arguments(0, '"Pa')]),
        ("ris\n", [Arguments(0, "ris")]),
        ("</parameter>\n<parameter=days>\n1", [Arguments(0, '"'), Arguments(0, ', "days": ')]),
        ("2\n</parameter>", [Arguments(0, "12")]),
        ("\n</function>", [Arguments(0, "}")]),
        ("\n</tool_call>", []),
    ]
    assert [(text, parser.feed(text)) for text, _ in steps] == steps
    assert not parser.in_call


def by_pattern(text: str) -> Read:
    """Read an answer that the model ended itself, with regular expressions over the whole text."""
    name = r"([^<>\n]*[^<>\s][^<>\n]*)>"
    types = {key: frozenset([*({schema["type"]} if isinstance(schema.get("type"), str) else schema.get("type", []))])
             for key, schema in PROPERTIES.items()}  # fmt: skip
    outside, calls, place, first = "", [], 0, ""
    opening = re.compile(r"<tool_call>\s*<function=" + name)
    while begun := opening.search(text, place):
        outside += text[place : begun.start()]
        first = first if calls else outside
        own, arguments, place = begun.group(1).strip(), {}, begun.end()
        stray, over = "", False
        while not over:
            tag = re.compile(r"<parameter=" + name + r"|</function>|</tool_call>|<tool_call>|\Z").search(text, place)
            assert tag is not None
            stray += text[place : tag.start()]
            key = (tag.group(1) or "").strip()
            if key and key in arguments:
                stray, place = stray + "<parameter=", tag.start() + len("<parameter=")
                continue
            outside, stray = outside + stray.rstrip(), ""
            place = tag.end()
            if key:
                end = re.compile(r"\n?</parameter>|\n(?=<parameter=|</function>|</tool_call>)|\n?\Z").search(
                    text, place
                )
                assert end is not None
                raw = text[place : end.start()] if end.start() > place else ""
                arguments[key] = json_value(
                    raw.removeprefix("\n"), types.get(key if own == "weather" else "", frozenset())
                )
                place = end.end()
                continue
            over = True
            if tag.group() == "<tool_call>":
                place = tag.start()
            elif tag.group() == "</function>":
                more = re.compile(r"\s*</tool_call>").match(text, place)
                place = more.end() if more else place
        calls.append(
            [own, "{" + ", ".join(f"{json.dumps(k, ensure_ascii=False)}: {v}" for k, v in arguments.items()) + "}"]
        )
        another = re.compile(r"(?<=</function>)\s*(?=<function=" + name + ")").match(text, place)
        if another:
            text, place = "<tool_call>" + text[another.end() :], 0
    outside += text[place:]
    if calls:
        outside = outside.rstrip() if first.strip() else outside.strip()
    return Read(outside, calls)


TAGS = ("<tool_call>", "</tool_call>", "<function=now>", "<function=weather>", "</function>", "<parameter=city>",
        "<parameter=days>", "</parameter>", "\n", "<tool_call>\n<function=weather>\n<parameter=note>\n")  # fmt: skip


@settings(max_examples=500)
@given(soup(*TAGS), PLACES)
def test_any_text_cut_anywhere_is_read_as_patterns_read_it(text: str, places: list[int]) -> None:
    expected = by_pattern(text)
    assert read([text]) == expected
    assert read(cut(text, places)) == expected
    assert read(list(text)) == expected
    for _, arguments in expected.calls:
        json.loads(arguments)


@settings(max_examples=300)
@given(soup(*TAGS), PLACES, st.booleans())
def test_pieces_come_in_the_same_order_for_every_cut(text: str, places: list[int], cut_off: bool) -> None:
    def pieces_of(texts: Sequence[str]) -> list[Piece]:
        parser = Qwen3CoderParser(TOOLS)
        return joined([piece for one in texts for piece in parser.feed(one)] + parser.finish(cut=cut_off))

    assert pieces_of([text]) == pieces_of(cut(text, places)) == pieces_of(list(text))


@settings(max_examples=200)
@given(soup(*TAGS))
def test_no_letter_of_an_answer_is_lost(text: str) -> None:
    """Every letter outside of tags comes out, in order of its kind."""
    found = read([text], cut_off=True)
    letters = re.sub(r"[^é🙂]", "", text)
    out = found.content + "".join(arguments for _, arguments in found.calls) + "".join(name for name, _ in found.calls)
    assert sorted(re.sub(r"[^é🙂]", "", out)) == sorted(letters)


VALUES = {
    "city": st.text('ab\n é🙂"\\<>/{}12', max_size=10),
    "days": st.integers(),
    "warm": st.booleans(),
    "where": st.dictionaries(st.text("a<>\n", max_size=3), st.integers() | st.none() | st.text('é"', max_size=3)),
    "note": st.none() | st.text("nul\n", max_size=5).filter(lambda text: text.strip() != "null"),
}
CALLS = st.lists(
    st.tuples(st.just("weather"), st.fixed_dictionaries({}, optional=VALUES)) | st.tuples(st.just("now"), st.just({})),
    min_size=1,
    max_size=3,
)


@settings(max_examples=200, deadline=None)
@given(CALLS, st.sampled_from(["", "I look.", "a\n\nb"]), PLACES)
def test_what_the_template_writes_is_read_back(
    calls: list[tuple[str, dict[str, Any]]], said: str, places: list[int]
) -> None:
    """The template is rendered by Transformers, as a model has learned to write."""
    from transformers.utils.chat_template_utils import render_jinja_template

    turn = {
        "role": "assistant",
        "content": said,
        "tool_calls": [{"function": {"name": name, "arguments": arguments}} for name, arguments in calls],
    }
    ((text,), _) = render_jinja_template([[{"role": "user", "content": "x"}, turn]], chat_template=TEMPLATE)
    answer = text.split("</think>\n\n")[1].removesuffix("<|im_end|>\n")
    for pieces in ([answer], cut(answer, places), list(answer)):
        found = read(pieces)
        assert found.content == said
        assert [(name, json.loads(arguments)) for name, arguments in found.calls] == calls


def test_the_table_has_the_names_that_the_configuration_accepts() -> None:
    assert set(TOOL_PARSERS) == set(TOOL_TAGS) == set(get_args(ToolCallParserName))
