"""The provider `hip` of the norms: where it runs and what it takes. Nothing of it is imported before it is chosen."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from rocm_serve.ops.contract import Facts, OpFunction, Provider
from rocm_serve.platform.table import archs_of

MAX_WIDTH = 16384
CHUNK = 8  # bf16 columns of one 16-byte access


def hip_provider(op: str, limits: Callable[[Facts], str | None], folder: str = "") -> Provider:
    """Describe the provider of `op`: the function that `make_<op>` of ops/<folder>/hip.py makes of a library.

    `limits` says why a model's sizes are not taken, or None.
    """

    def load() -> OpFunction:
        library = importlib.import_module("rocm_serve.ops.hip_library").loaded_library()
        made: OpFunction = getattr(importlib.import_module(f"rocm_serve.ops.{folder or op}.hip"), f"make_{op}")(library)
        return made

    def accepts(facts: Facts) -> str | None:
        if facts.get("dtype", "bfloat16") != "bfloat16":
            return f"takes bfloat16 rows, not {facts['dtype']}"
        refused = limits(facts)
        if refused:
            return refused
        missing: str | None = importlib.import_module("rocm_serve.ops.hip_library").why_missing()
        return missing

    return Provider("hip", load=load, archs=archs_of(op, "hip"), accepts=accepts)


def width_limit(facts: Facts, name: str, largest: int = MAX_WIDTH, multiple: int = CHUNK) -> str | None:
    """Say why a width, named as in ops/facts.py, is not taken; a fact that is not known refuses nothing."""
    width: Any = facts.get(name)
    if width is None or (width % multiple == 0 and width <= largest):
        return None
    return f"takes a {name} that is a multiple of {multiple} up to {largest}, not {width}"
