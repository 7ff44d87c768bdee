"""The public surface: a flag, a default or a type that changes is a reviewed change of tests/golden/surface.json.

The golden file is made by `python -m tests.contracts.test_surface`.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
import typer

from rocm_serve.cli import app
from rocm_serve.config import aliases
from rocm_serve.config.load import FIELDS, flag_name
from rocm_serve.config.schema import ServeConfig

GOLDEN = Path(__file__).parents[1] / "golden" / "surface.json"
# The flags that users' scripts are promised.
PROMISED = (
    "model served-model-name host port tp pp ep nnodes node-rank dist-init-addr dist-timeout watchdog-timeout device"
    " dtype kv-cache-dtype page-size chunked-prefill-size max-running-requests max-model-len mem-fraction load-format"
    " enforce-eager op seed log-level config"
)


def surface() -> dict[str, Any]:
    """Describe every command's options and every field of the configuration."""
    groups = [(f"{one.typer_instance.info.name} ", one.typer_instance) for one in app.registered_groups]
    commands = {
        before + (command.name or command.callback.__name__.replace("_", "-")): options_of(command.callback)
        for before, of in [("", app), *groups]
        for command in of.registered_commands
        if command.callback is not None
    }
    hints = get_type_hints(ServeConfig)
    config = {
        name: {"type": str(hints[name]).replace("typing.", ""), "default": default_of(field)}
        for name, field in FIELDS.items()
    }
    spellings = dict(aliases.SPELLINGS) | dict(aliases.SWITCHES)
    spellings |= {flag: f"{key}={value}" for flag, (key, value) in aliases.SETTINGS.items()}
    return {"commands": commands, "config": config, "spellings": spellings}


def options_of(callback: Callable[..., Any]) -> dict[str, Any]:
    hints = get_type_hints(callback, include_extras=True)
    options = {}
    for name, parameter in inspect.signature(callback).parameters.items():
        if hints[name] is typer.Context:
            continue
        kind, option = get_args(hints[name])[:2]
        # Inside Annotated, typer keeps the first spelling where a default would be.
        spellings = [word for word in (option.default, *(option.param_decls or ())) if isinstance(word, str)]
        flag = next((word for word in spellings if word.startswith("--")), flag_name(name))
        required = parameter.default is inspect.Parameter.empty
        options[flag] = {"type": str(kind), "default": "required" if required else repr(parameter.default)}
    return options


def default_of(field: msgspec.structs.FieldInfo) -> str:
    if field.default_factory is not msgspec.NODEFAULT:
        return repr(field.default_factory())
    return "required" if field.default is msgspec.NODEFAULT else repr(field.default)


def test_the_surface_is_the_reviewed_one() -> None:
    assert surface() == json.loads(GOLDEN.read_text(encoding="utf-8")), (
        "if meant: python -m tests.contracts.test_surface"
    )


def test_serve_has_every_promised_flag() -> None:
    assert {f"--{name}" for name in PROMISED.split()} <= set(surface()["commands"]["serve"])


def test_every_field_of_the_configuration_is_a_flag_and_the_other_way_round() -> None:
    flags = set(surface()["commands"]["serve"]) - {"--config"}
    assert flags == {flag_name(field) for field in FIELDS}


if __name__ == "__main__":
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(json.dumps(surface(), indent=1) + "\n", encoding="utf-8")
