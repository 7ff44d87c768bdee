"""Flags, environment and a TOML file -> ServeConfig. The only reader of the process's environment.

Precedence: flag > environment variable ROCM_SERVE_<NAME> > file > default. Nobody's typing error is passed over: an
unknown key or variable is refused by name. One kind of variable is passed over: in a namespace with a Service called
`rocm-serve`, Kubernetes gives every container the variables of a Docker link, some under our prefix:

    ROCM_SERVE_SERVICE_HOST=10.0.0.1        ROCM_SERVE_PORT=tcp://10.0.0.1:8000
    ROCM_SERVE_SERVICE_PORT=8000            ROCM_SERVE_PORT_8000_TCP=tcp://10.0.0.1:8000
    ROCM_SERVE_SERVICE_PORT_HTTP=8000       ROCM_SERVE_PORT_8000_TCP_{PROTO,PORT,ADDR}=tcp, 8000, 10.0.0.1

A Service called `rocm-serve-NAME` adds the same under ROCM_SERVE_NAME_. Name and value must both have that form.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from rocm_serve.config import aliases
from rocm_serve.config.schema import ServeConfig
from rocm_serve.errors import UserError

ENV_PREFIX = "ROCM_SERVE_"
FIELDS: dict[str, msgspec.structs.FieldInfo] = {f.name: f for f in msgspec.structs.fields(ServeConfig)}


# Settings of libraries that read the environment when they are loaded; a value that the user has set is kept.
LIBRARY_DEFAULTS = {
    # torch's OpenMP threads spin while they wait. Beside an HTTP server, or on a machine that does other things, they
    # keep each other from running: the same 16 tokens took 95 s with spinning and 13 s without, on two busy cores.
    "OMP_WAIT_POLICY": "PASSIVE",
    # MKL, by which torch multiplies float32 on x86-64, cuts sums among threads on some processors: then two stages of
    # one thread each give other bits than one stage of two. Its strict mode does not; it costs little.
    "MKL_CBWR": "AUTO,STRICT",
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


def check_value(field: str, text: str, flag: str) -> None:
    """Refuse a text that is no value of `field`, which was given as `flag`. Errors: UserError."""
    kind = get_type_hints(ServeConfig)[field]
    try:
        msgspec.convert(text, kind, strict=False)
    except msgspec.ValidationError:
        raise UserError(f"command line: {flag} {text!r}: legal: {_legal(field, kind)}") from None


def _from_environment(environ: Mapping[str, str]) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, text in environ.items():
        if not name.startswith(ENV_PREFIX) or _of_a_link(name, text):
            continue
        field = name.removeprefix(ENV_PREFIX).lower()
        found[field] = parse_ops(text.split(",")) if field == "op" else text
    return found


_ADDRESS = r"[0-9a-fA-F.:\[\]]+"
_LINK_VARIABLES = tuple(
    (re.compile(f"{ENV_PREFIX}([A-Z0-9_]+_)?{name}"), re.compile(value))
    for name, value in (
        (r"SERVICE_HOST", _ADDRESS),
        (r"SERVICE_PORT(_[A-Z0-9_]+)?", r"\d+"),
        (r"PORT", rf"(tcp|udp|sctp)://{_ADDRESS}:\d+"),
        (r"PORT_\d+_(TCP|UDP|SCTP)", rf"(tcp|udp|sctp)://{_ADDRESS}:\d+"),
        (r"PORT_\d+_(TCP|UDP|SCTP)_PROTO", r"tcp|udp|sctp"),
        (r"PORT_\d+_(TCP|UDP|SCTP)_PORT", r"\d+"),
        (r"PORT_\d+_(TCP|UDP|SCTP)_ADDR", _ADDRESS),
    )
)


def _of_a_link(name: str, text: str) -> bool:
    """Tell whether Kubernetes or Docker has set this variable for a service that bears our name."""
    return any(form.fullmatch(name) and value.fullmatch(text) for form, value in _LINK_VARIABLES)


def _typed(values: Mapping[str, object], source: str) -> dict[str, object]:
    """Check names and types of one source, so that the message can name it."""
    typed: dict[str, object] = {}
    for name, value in values.items():
        if name not in FIELDS:
            ours = aliases.ours(name)
            if ours is not None:
                raise UserError(f"{source}: {name!r} is called {ours!r} here")
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
