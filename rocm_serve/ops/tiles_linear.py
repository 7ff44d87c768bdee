"""Tiles of the plain product in Triton, by rule and to be tried; see tiles.py. No torch.

A shape: `rows`, `n` rows of the weight, `k` columns, `bytes` of the numbers multiplied. A program makes BM rows by BN
columns of the result, BK inner columns at a time.
"""

from __future__ import annotations

from collections.abc import Mapping

Tile = dict[str, int]
Shape = Mapping[str, int]

_PROGRAMS = 256  # that a product should have: two for each unit of an H200, nearly one for each of an MI300X
_SHARED = 160 << 10  # bytes of tiles on their way in one program, at most


def linear_tile(shape: Shape, arch: str) -> Tile:
    """Cut a weight that few rows read into enough programs to have all of memory busy; many rows take square tiles."""
    if shape["bytes"] == 4:  # for proofs, not for speed: each step is unrolled into fused multiply-adds
        return _tile(16, 128, 32, 4, 1)
    few, some = (2, 2) if arch.startswith("gfx") else (3, 4)
    rows = _rows_of_tile(shape)
    if rows > 32:
        return _tile(rows, 128, 64, 8, few)
    columns = next((size for size in (128, 64, 32) if shape["n"] >= size * _PROGRAMS), 16)
    return _tile(rows, columns, 128 if columns > 16 else 256, 4, some)


def linear_tiles(shape: Shape, arch: str) -> list[Tile]:
    """List tiles that may win at so many rows."""
    if shape["bytes"] == 4:
        return []
    rows, gfx = _rows_of_tile(shape), arch.startswith("gfx")
    stages = (1, 2) if gfx else (2, 3, 4, 6)
    if rows > 64:
        shapes = ((128, 32, 4), (128, 64, 4), (128, 64, 8), (256, 32, 8), (256, 64, 8))
        return [_tile(rows, columns, k, warps, s) for columns, k, warps in shapes for s in stages[:3]]
    found = [
        _tile(rows, columns, k, warps, s)
        for columns, k, warps in (
            *((16, 128, 2), (16, 256, 4), (16, 512, 4), (32, 128, 4), (32, 256, 4)),
            *((64, 64, 4), (64, 128, 4), (128, 64, 4), (128, 128, 8)),
        )
        for s in stages
    ]
    return [one for one in found if 2 * (one["BM"] + one["BN"]) * one["BK"] * one["num_stages"] <= _SHARED]


def _rows_of_tile(shape: Shape) -> int:
    return next((size for size in (16, 32, 64) if shape["rows"] <= size), 128)


def _tile(rows: int, columns: int, k: int, warps: int, stages: int) -> Tile:
    return {"BM": rows, "BN": columns, "BK": k, "num_warps": warps, "num_stages": stages}
