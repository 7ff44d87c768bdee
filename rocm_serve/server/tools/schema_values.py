"""From the text of one argument to JSON, by the types that the tool's JSON schema allows for it."""

from __future__ import annotations

import ast
import json
import math
import re
import warnings
from collections.abc import Mapping, Sequence

Schema = Mapping[str, object]
Types = frozenset[str]  # names of JSON schema; empty: the schema does not say, the value is a string

STRING: Types = frozenset({"string"})
STRING_OR_NULL: Types = frozenset({"string", "null"})
_ALIASES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "dict": "object", "list": "array"}
_NAMES = frozenset({"string", "integer", "number", "boolean", "object", "array", "null"})
_MAX_DEPTH = 16  # of references and alternatives
_INTEGER = re.compile(r"[+-]?[0-9]+")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")
_MAX_LITERAL_CHARS = 2**16
_MAX_LITERAL_DEPTH = 50


def types_of_arguments(function: Mapping[str, object]) -> dict[str, Types]:
    """Return the types of each argument that a function (of `tools`) declares."""
    root = function.get("parameters")
    properties = root.get("properties") if isinstance(root, Mapping) else None
    if not isinstance(root, Mapping) or not isinstance(properties, Mapping):
        return {}
    return {name: _types(schema, root, set()) for name, schema in properties.items()}


def _types(schema: object, root: Schema, seen: set[str], depth: int = 0) -> Types:
    """Return every type that some branch allows. `seen`: references that were followed; once is enough for a union."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return frozenset()
    if schema.get("nullable") is True:  # OpenAPI's spelling
        return _types({**schema, "nullable": False}, root, seen, depth) | {"null"}
    reference = schema.get("$ref")
    if isinstance(reference, str):
        if reference in seen:
            return frozenset()
        seen.add(reference)
        return _types(_referred(reference, root), root, seen, depth + 1)
    declared = schema.get("type")
    if declared is not None:
        names = declared if isinstance(declared, list) else [declared]
        return frozenset(_ALIASES.get(name, name) for name in names if isinstance(name, str)) & _NAMES
    found: Types = frozenset()
    for key in ("anyOf", "oneOf", "allOf"):
        parts = schema.get(key)
        if isinstance(parts, list):
            found = found.union(*(_types(part, root, seen, depth + 1) for part in parts))
    if found:
        return found
    if isinstance(schema.get("enum"), list) or "const" in schema:
        values = schema.get("enum")
        return frozenset(map(_type_of, values if isinstance(values, list) else [schema["const"]]))
    return frozenset(name for name, key in (("object", "properties"), ("array", "items")) if key in schema)


def _referred(reference: str, root: Schema) -> object:
    """Follow `#/$defs/NAME` within the tool's own schema."""
    place: object = root
    for step in reference.removeprefix("#").split("/")[1:]:
        place = place.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(place, Mapping) else None
    return place


def _type_of(value: object) -> str:
    if value is None:
        return "null"
    for kind, name in ((str, "string"), (bool, "boolean"), (int, "integer"), (float, "number"), (Mapping, "object")):
        if isinstance(value, kind):
            return name
    return "array"


def json_text(value: object) -> str:
    """Return JSON with real characters; escapes all of them if one is a lone surrogate, which UTF-8 cannot hold.

    Errors: ValueError for NaN and infinity, TypeError for what JSON does not have.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return json.dumps(value, allow_nan=False)
    return text


def json_value(raw: str, types: Types) -> str:
    """Return the JSON text of an argument: of the first type that it can be read as, else of a string.

    A type that is written in one way only goes first. Where a string is allowed, a number must be written as JSON
    writes it, so that "007" stays what it is.
    """
    text = raw.strip()
    if "null" in types and text.casefold() == "null":
        return "null"
    if "boolean" in types and text.casefold() in ("true", "false"):
        return text.casefold()
    if types & {"integer", "number"}:
        number = _number(text, whole="number" not in types)
        if number is not None and ("string" not in types or number == text):
            return number
    if types & {"object", "array"} and text[:1] in ("{", "["):
        found = _container(text)
        if found is not None and ("object" if text[0] == "{" else "array") in types:
            return found
    return json_text(raw)


def _number(text: str, *, whole: bool) -> str | None:
    try:
        if _INTEGER.fullmatch(text):
            return str(int(text))
        if not whole and _NUMBER.fullmatch(text) and math.isfinite(float(text)):
            return repr(float(text))
    except ValueError:  # Python's limit on the digits of an integer
        return None
    return None


def _container(text: str) -> str | None:
    """Read an object or a list as JSON, or as Python writes it (models mix up true and True)."""
    try:
        return json_text(json.loads(text))
    except (ValueError, RecursionError):
        value = _python_literal(text)
    try:
        return None if value is None else json_text(value)
    except (ValueError, TypeError, RecursionError):
        return None


def _python_literal(text: str) -> object:
    """Return the dict or list that a Python literal of modest size stands for, or None."""
    if len(text) > _MAX_LITERAL_CHARS or _deepest(text) > _MAX_LITERAL_DEPTH:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of odd escapes in strings
        try:
            value: object = ast.literal_eval(text)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            return None
    return value if isinstance(value, dict | list) else None


def _deepest(text: str) -> int:
    depth = deepest = 0
    for char in text:
        depth += (char in "([{") - (char in ")]}")
        deepest = max(deepest, depth)
    return deepest


class ArgumentWriter:
    """Writes one argument as JSON while its text comes. A string leaves at once; other types when they are whole."""

    def __init__(self, types: Types) -> None:
        self._types = types
        self._is_string = types <= STRING
        self._quoted = False
        self._parts: list[str] = []  # text that is not out yet

    def push(self, text: str) -> str:
        """Take text and return the JSON that may go out."""
        self._parts.append(text)
        if self._types == STRING_OR_NULL and not self._is_string:
            known = "".join(self._parts)
            self._is_string = not "null".startswith(known.strip().casefold())
        return self._string_out() if self._is_string else ""

    def close(self) -> str:
        """Return the rest of the JSON; the text is whole."""
        if self._is_string:
            return ("" if self._quoted else '"') + '"'
        return json_value("".join(self._parts), self._types)

    def cut(self) -> str:
        """Return what was kept back, as it is: the text was cut off, and so is the JSON."""
        return "" if self._is_string else "".join(self._parts)

    def _string_out(self) -> str:
        text = json.dumps("".join(self._parts), ensure_ascii=False)[1:-1]
        self._parts.clear()
        if not text or self._quoted:
            return text
        self._quoted = True
        return '"' + text


def tool_functions(tools: Sequence[Mapping[str, object]]) -> dict[str, Mapping[str, object]]:
    """Return the functions of checked `tools` by name."""
    functions = [tool["function"] for tool in tools]
    return {str(function["name"]): function for function in functions if isinstance(function, Mapping)}
