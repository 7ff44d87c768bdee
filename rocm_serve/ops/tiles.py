"""Which tile a Triton kernel runs with: a tuned one where this card has one for the shape, else by rule. No torch.

A pure function of kernel, shape and card, so that it can be printed, tested and tuned anywhere. A shape is what is
static in a launch, and `rows`, which is rounded up to a power of two: a batch of 5 and the captured batch of 8 that it
is padded to run the same code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib import resources

import msgspec

Tile = dict[str, int]
Shape = Mapping[str, int]
Rule = Callable[[Shape, str], Tile]  # shape, arch -> tile
Candidates = Callable[[Shape, str], list[Tile]]

RULES: dict[str, Rule] = {}  # kernel -> what it runs with where nothing was tuned
CANDIDATES: dict[str, Candidates] = {}  # kernel -> what `rocm-serve tune` tries


def bucketed(shape: Shape) -> dict[str, int]:
    """Return the shape with `rows` rounded up to a power of two."""
    rows = shape.get("rows")
    return {**shape} if rows is None else {**shape, "rows": 1 << max(rows - 1, 0).bit_length()}


def shape_key(shape: Shape) -> str:
    """Name a shape in the tuned table: "k=2048,n=512,rows=8"."""
    return ",".join(f"{name}={size}" for name, size in sorted(bucketed(shape).items()))


def tile(kernel: str, shape: Shape, arch: str) -> Tile:
    """Return the tile of `kernel` for this shape. Errors: KeyError for a kernel that no rule knows."""
    found = tuned_table(arch).get(kernel, {}).get(shape_key(shape))
    return dict(found) if found is not None else RULES[kernel](bucketed(shape), arch)


@cache
def tuned_table(arch: str) -> dict[str, dict[str, Tile]]:
    """Return the committed table of this card, kernel -> shape key -> tile; empty where it was never tuned."""
    file = resources.files("rocm_serve.ops") / "tuned" / f"{arch}.json"
    return msgspec.json.decode(file.read_bytes(), type=dict[str, dict[str, Tile]]) if file.is_file() else {}
