"""Flags, environment and a TOML file -> ServeConfig. The only reader of the process's environment.

Precedence: flag > environment variable ROCM_SERVE_<NAME> > file > default. Nobody's typing error is passed over: an
unknown key or variable is refused by name.
"""

from __future__ import annotations

import difflib
import os
import tomllib
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from rocm_serve.config.schema import ServeConfig
from rocm_serve.errors import UserError

ENV_PREFIX = "ROCM_SERVE_"
FIELDS: dict[str, msgspec.structs.FieldInfo] = {f.name: f for f in msgspec.structs.fields(ServeConfig)}


# Settings of libraries that read the environment when they are loaded; a value that the user has set is kept.
LIBRARY_DEFAULTS = {
    # torch's OpenMP threads spin while they wait. Beside an HTTP server, or on a machine that does other things, they
    # keep each other from running: 16 tokens of the tiny checkpoint took 70 s instead of 2 on two busy cores.
    "OMP_WAIT_POLICY": "PASSIVE",
}


def environment() -> dict[str, str]:
    """Copy this process's environment, library defaults added: for `load` and for starting children."""
    return LIBRARY_DEFAULTS | dict(os.environ)


def set_library_defaults() -> None:
    """Set them in this process. To be called before torch is loaded."""
    for name, value in LIBRARY_DEFAULTS.items():
        os.environ.setdefault(name, value)


def load(flags: Mapping[str, object], file: Path | None, environ: Mapping[str, str]) -> ServeConfig:
    """Merge the three sources. `flags` holds only what was given on the command line.

    Errors: UserError naming the source, the key and what is legal.
    """
    merged: dict[str, object] = {}
    if file is not None:
        merged |= _typed(read_file(file), str(file))
    merged |= _typed(_from_environment(environ), "environment")
    merged |= _typed(flags, "command line")
    if "model" not in merged:
        raise UserError('no model given: --model DIR, or model = "DIR" in the file of --config')
    return msgspec.convert(merged, ServeConfig)


def read_file(path: Path) -> dict[str, object]:
    """Read a flat TOML file; keys are flags without the dashes in front, `-` and `_` are the same."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"--config {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"--config {path} is not TOML: {error}") from None
    return {key.replace("-", "_"): value for key, value in data.items()}


def parse_ops(pairs: list[str]) -> dict[str, str]:
    """Read `--op OP=PROVIDER`, given any number of times."""
    ops: dict[str, str] = {}
    for pair in pairs:
        name, equals, provider = pair.partition("=")
        if not (name and equals and provider):
            raise UserError(f"--op {pair!r}: expected OP=PROVIDER, such as moe_experts=reference")
        if ops.get(name, provider) != provider:
            raise UserError(f"--op {name} is given twice: {ops[name]} and {provider}")
        ops[name] = provider
    return ops


def flag_name(field: str) -> str:
    return "--" + field.replace("_", "-")


def choices(field: str) -> tuple[str, ...]:
    """List the words a field takes; empty when it is not a choice among words."""
    found: list[str] = []

    def walk(kind: Any) -> None:
        if get_origin(kind) is Literal:
            found.extend(str(value) for value in get_args(kind))
        else:
            for part in get_args(kind):
                walk(part)

    walk(get_type_hints(ServeConfig)[field])
    return tuple(found)


def _from_environment(environ: Mapping[str, str]) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, text in environ.items():
        if not name.startswith(ENV_PREFIX):
            continue
        field = name.removeprefix(ENV_PREFIX).lower()
        found[field] = parse_ops(text.split(",")) if field == "op" else text
    return found


def _typed(values: Mapping[str, object], source: str) -> dict[str, object]:
    """Check names and types of one source, so that the message can name it."""
    typed: dict[str, object] = {}
    for name, value in values.items():
        if name not in FIELDS:
            near = difflib.get_close_matches(name, FIELDS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(FIELDS)}"
            raise UserError(f"{source}: unknown key {name!r}{hint}")
        kind = get_type_hints(ServeConfig)[name]
        try:
            # The environment has only text; a file must use TOML's own types.
            typed[name] = msgspec.convert(value, kind, strict=source != "environment")
        except msgspec.ValidationError:
            raise UserError(f"{source}: {flag_name(name)} {value!r}: legal: {_legal(name, kind)}") from None
    return typed


def _legal(name: str, kind: object) -> str:
    words = choices(name)
    if words:
        return ", ".join(words)
    if name == "op":
        return "pairs of op and provider"
    base = [part for part in get_args(kind) if part is not types.NoneType] or [kind]
    return {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text"}[base[0].__name__]
