"""Tiles of the product with a block-FP8 weight in Triton, by rule and to be tried; see tiles.py. No torch.

A shape: `rows`, `n` rows of the weight, `k` columns, `bits` of the factors by rule, `fp8`: rows are quantised. A
program makes BM rows by BN columns of the result, BK columns of both at a time.

MANY: of triton_rows.py. Both factors are FP8, and PARTS blocks of BN columns share the rows. Tiles of GROUP times BM
rows follow each other down the columns, so that a weight is read once for all of them. PROGRAMS: as many take one tile
after the other; 0: one each. DESC: the card's copy engine reads both factors (NVIDIA's, sm_90). REGS: rows are
multiplied from registers.
"""

from __future__ import annotations

from collections.abc import Mapping

Tile = dict[str, int]
Shape = Mapping[str, int]

_BLOCK = 128  # of FP8 scales, both ways
_FEWEST = 64  # rows for which more than the rule's tile is tried
_ENGINES = ("sm_90",)  # cards whose copy engine reads tiles
_UNITS = 132  # of such a card


def fp8_linear_tile(shape: Shape, arch: str) -> Tile:
    """Choose by rows alone. float32 is for proofs, not for speed: it is unrolled into fused multiply-adds."""
    if shape["bits"] == 32:
        return _tile(16, 32, 4, 1)
    rows = next((size for size in (16, 32, 64) if shape["rows"] <= size), 128)
    deep = 128 if shape["bits"] == 8 else 64
    return _tile(rows, deep, 8 if rows >= 64 else 4, 2 if arch.startswith("gfx") else 3)


def fp8_linear_tiles(shape: Shape, arch: str) -> list[Tile]:
    """List what may win for many rows, of weights of whole blocks."""
    whole = shape["n"] % _BLOCK == 0 and shape["k"] % _BLOCK == 0
    if shape["bits"] == 32 or not shape["fp8"] or not whole or shape["rows"] < _FEWEST:
        return []
    if arch not in _ENGINES:
        sizes = (64,) if shape["rows"] < 128 else (64, 128)
        stages = 2 if arch.startswith("gfx") else 3
        return [_many(bm, 128, 1, warps, stages, GROUP=8) for bm in sizes for warps in (4, 8)]
    # Compiled for sm_90, none spills or has its matrix instructions serialised.
    small = [
        _many(64, 128, 1, 4, 4, DESC=1),
        _many(64, 128, 1, 4, 4, DESC=1, PROGRAMS=2 * _UNITS),
        _many(64, 64, 2, 4, 3, DESC=1, REGS=1),
        _many(64, 64, 4, 4, 2, DESC=1),
    ]
    if shape["rows"] < 128:
        return small
    return [
        _many(128, 128, 1, 8, 4, DESC=1),
        _many(128, 128, 1, 8, 4, DESC=1, PROGRAMS=_UNITS),
        _many(128, 64, 2, 8, 4, DESC=1, PROGRAMS=_UNITS),
        _many(128, 64, 4, 8, 3, DESC=1),
        _many(128, 64, 4, 8, 4, DESC=1),
        *small,
    ]


def _tile(rows: int, deep: int, warps: int, stages: int) -> Tile:
    """Return a tile of one block of scales, so that BK divides 128 too."""
    return {"MANY": 0, "BM": rows, "BN": _BLOCK, "BK": deep, "num_warps": warps, "num_stages": stages}


def _many(rows: int, columns: int, parts: int, warps: int, stages: int, **changes: int) -> Tile:
    tile = {"MANY": 1, "BM": rows, "BN": columns, "BK": _BLOCK, "PARTS": parts, "GROUP": 8, "PROGRAMS": 0}
    return tile | {"DESC": 0, "REGS": 0, "num_warps": warps, "num_stages": stages} | changes
