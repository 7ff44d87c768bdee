"""The Triton providers of ops: where they may be chosen, and how they are loaded.

The kernels are in `ops/<op>/triton.py`; they alone import Triton, when they are loaded.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

from rocm_serve.ops.contract import Facts, OwnBound, Provider, lazy
from rocm_serve.platform.table import archs_of


def triton_provider(
    op: str,
    *,
    folder: str | None = None,
    limits: Callable[[Facts], str | None] = lambda facts: None,
    bound: Callable[[str, Facts], OwnBound | None] = lambda arch, facts: None,
) -> Provider:
    """Return the provider of `op` that is the function `op` of ops/`folder`/triton.py (`folder`: as the op).

    `limits` says why its kernels cannot serve these facts, or None. `bound`: as in Provider.
    """
    return Provider(
        "triton",
        load=lazy(f"rocm_serve.ops.{folder or op}.triton", op),
        archs=archs_of(op, "triton"),
        accepts=lambda facts: _not_here() or _rows(facts) or limits(facts),
        bound=bound,
        packages=("triton",),
    )


def at_most(limit: int, name: str, what: str) -> Callable[[Facts], str | None]:
    """Return limits that refuse a size above `limit`: the fact `name`, called `what` in the words of the refusal."""

    def refuse(facts: Facts) -> str | None:
        size = facts.get(name, 0)
        assert isinstance(size, int), f"{name} is a size"
        return f"takes {what} of up to {limit}, not {size}" if size > limit else None

    return refuse


def _not_here() -> str | None:
    return None if importlib.util.find_spec("triton") else "needs the package triton, which torch for GPUs brings along"


def _rows(facts: Facts) -> str | None:
    dtype = facts.get("dtype", "bfloat16")
    return None if dtype in ("bfloat16", "float32") else f"takes rows in bfloat16 or float32, not {dtype}"
