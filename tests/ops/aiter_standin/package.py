"""Write an AITER that is nothing but signatures: a package as one release has it, for the ABI reader and the adapters.

The functions' bodies are those of behaviour.py, which checks every argument and computes on the CPU.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

_DATA = Path(__file__).parent / "signatures.json"
_HEAD = "import torch\nfrom tests.ops.aiter_standin.behaviour import *\n\n"
_INIT = "from tests.ops.aiter_standin.behaviour import ActivationType, QuantType, dtypes\n"


@cache
def _data() -> Any:
    return json.loads(_DATA.read_text(encoding="utf-8"))


def releases() -> tuple[str, ...]:
    """Return the releases that can be written, oldest first."""
    return tuple(_data()["releases"])


def signature(function: str, release: str) -> str:
    """Return the signature that a release has, with its brackets."""
    signatures = _data()["functions"][function]["signatures"]
    order = _data()["releases"]
    return str(signatures[max((r for r in signatures if order.index(r) <= order.index(release)), key=order.index)])


def write_package(root: Path, release: str) -> Path:
    """Write the package `aiter` of a release below `root` and return its folder."""
    folder = root / "aiter"
    modules: dict[str, dict[str, str]] = {}
    for function, known in _data()["functions"].items():
        modules.setdefault(known["file"], {})[function] = signature(function, release)
    for file, functions in modules.items():
        path = root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_HEAD + _module(functions), encoding="utf-8")
    (folder / "jit").mkdir()
    (folder / "jit" / "core.py").write_text("", encoding="utf-8")
    for inner in {folder, *(path.parent for path in folder.rglob("*.py"))}:
        for package in (inner, *inner.parents):
            if package.is_relative_to(folder):
                (package / "__init__.py").write_text(_INIT if package == folder else "", encoding="utf-8")
    return folder


def _module(functions: dict[str, str]) -> str:
    lines = []
    owners: dict[str, list[str]] = {}
    for function, parameters in functions.items():
        owner, _, name = function.rpartition(".")
        if not owner:
            lines.append(f'@strict("{name}")\ndef {name}{parameters}:\n    ...\n')
            continue
        inside = parameters[1:-1]
        method = f"({', '.join(filter(None, ['self', inside]))})"
        owners.setdefault(owner, []).append(f'    @strict_method("{function}")\n    def {name}{method}:\n        ...\n')
    lines += [f"class {owner}:\n" + "\n".join(methods) for owner, methods in owners.items()]
    return "\n\n".join(lines)
