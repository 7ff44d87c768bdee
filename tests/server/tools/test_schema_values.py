from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocm_serve.server.tools.schema_values import ArgumentWriter, json_text, json_value, types_of_arguments
from tests.server.cuts import PLACES, cut

TYPES = ("string", "integer", "number", "boolean", "object", "array", "null")


def types_of(schema: object, **root: object) -> set[str]:
    return set(types_of_arguments({"parameters": {"properties": {"x": schema}, **root}})["x"])


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"type": "integer"}, {"integer"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"type": "str"}, {"string"}),
        ({"type": "string", "nullable": True}, {"string", "null"}),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, {"integer", "null"}),
        ({"oneOf": [{"type": "array", "items": {}}, {"enum": ["a", 1, None]}]}, {"array", "string", "integer", "null"}),
        ({"enum": [True, 1.5, {}, []]}, {"boolean", "number", "object", "array"}),
        ({"const": 5}, {"integer"}),
        ({"properties": {}}, {"object"}),
        ({"items": {"type": "string"}}, {"array"}),
        ({"allOf": [{"$ref": "#/$defs/Item"}], "description": "one"}, {"object"}),
        ({"anyOf": [{"$ref": "#/$defs/Loop"}, {"type": "null"}]}, {"string", "null"}),
        ({"$ref": "#/$defs/missing"}, set()),
        ({"$ref": "https://example.org/schema"}, set()),
        ({"type": "colour"}, set()),
        ({"type": 5}, set()),
        ({}, set()),
        (True, set()),
    ],
)
def test_the_types_that_a_schema_allows(schema: object, types: set[str]) -> None:
    loop = {"anyOf": [{"$ref": "#/$defs/Loop"}] * 100 + [{"type": "string"}]}
    assert types_of(schema, **{"$defs": {"Item": {"type": "object"}, "Loop": loop}}) == types


@pytest.mark.parametrize("function", [{}, {"parameters": None}, {"parameters": {}}, {"parameters": {"properties": 5}}])
def test_a_function_may_declare_nothing(function: dict[str, Any]) -> None:
    assert types_of_arguments(function) == {}


@pytest.mark.parametrize(
    ("raw", "types", "value"),
    [
        ("12", ["string"], "12"),
        ("null", ["string"], "null"),
        ("NULL", ["string", "null"], None),
        ("12", [], "12"),
        ("12", ["integer"], 12),
        (" -12\n", ["integer"], -12),
        ("1.5", ["integer"], "1.5"),
        ("twelve", ["integer"], "twelve"),
        ("٣", ["integer"], "٣"),
        ("007", ["integer"], 7),
        ("007", ["integer", "string"], "007"),
        ("7", ["integer", "string"], 7),
        ("9" * 5000, ["integer"], "9" * 5000),
        ("1.50", ["number"], 1.5),
        ("3", ["number"], 3),
        ("1e3", ["number"], 1000.0),
        ("1e999", ["number"], "1e999"),
        ("nan", ["number"], "nan"),
        ("True", ["boolean"], True),
        ("false", ["boolean"], False),
        ("yes", ["boolean"], "yes"),
        ('{"a": [1, null]}', ["object"], {"a": [1, None]}),
        ("{'a': True, 'b': None}", ["object"], {"a": True, "b": None}),
        ("[1, (2, 3)]", ["array"], [1, [2, 3]]),
        ("[1]", ["object"], "[1]"),
        ("[1], 2", ["array"], "[1], 2"),
        ("{'a': 1}, 2", ["object", "array"], "{'a': 1}, 2"),
        ('{"a": 1e999}', ["object"], '{"a": 1e999}'),
        ('{"a": NaN}', ["object"], '{"a": NaN}'),
        ("{1, 2}", ["object"], "{1, 2}"),
        ("{open", ["object"], "{open"),
        ("[" * 100_000, ["array"], "[" * 100_000),
        ("[" + "-" * 60_000 + "1]", ["array"], "[" + "-" * 60_000 + "1]"),
        ("[" + "1+" * 30_000 + "1]", ["array"], "[" + "1+" * 30_000 + "1]"),
        (r"['\d']", ["array"], ["\\d"]),
        ("null", ["null"], None),
        ("0", ["null"], "0"),
    ],
)
def test_a_value_has_the_first_type_that_it_can_be_read_as(raw: str, types: list[str], value: object) -> None:
    assert json.loads(json_value(raw, frozenset(types))) == value


def test_a_lone_surrogate_in_json_stays_an_escape() -> None:
    text = json_value('{"a": "\\ud800é"}', frozenset({"object"}))
    assert text.encode("utf-8").isascii() and json.loads(text) == {"a": "\ud800é"}
    assert json_text("é🙂") == '"é🙂"'


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(JSON)
def test_what_a_template_writes_is_read_back(value: object) -> None:
    """Templates write strings as they are and other values as JSON."""
    names = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}
    name = names.get(type(value), "null")
    raw = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    assert json.loads(json_value(raw, frozenset({name}))) == value


@given(st.text('nulNUL \n"\\é1{}\x07', max_size=12), PLACES, st.frozensets(st.sampled_from(TYPES), max_size=3))
def test_the_writer_writes_the_same_for_every_cut(raw: str, places: list[int], types: frozenset[str]) -> None:
    writer = ArgumentWriter(types)
    written = "".join(map(writer.push, cut(raw, places))) + writer.close()
    assert written == json_value(raw, types) and written.encode("utf-8")
    writer = ArgumentWriter(types)
    broken = "".join(map(writer.push, cut(raw, places))) + writer.cut()
    assert json_value(raw, types).startswith(broken) or raw == broken


def test_a_string_leaves_at_once_and_null_is_waited_for() -> None:
    writer = ArgumentWriter(frozenset({"string"}))
    assert [writer.push("a"), writer.push('"'), writer.close()] == ['"a', '\\"', '"']
    writer = ArgumentWriter(frozenset({"string", "null"}))
    assert [writer.push("nu"), writer.push("t"), writer.push("s"), writer.close()] == ["", '"nut', "s", '"']
