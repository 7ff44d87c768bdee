"""Tiles of the product with a block-FP8 weight in Triton, by rule and to be tried; see tiles.py. No torch.

A shape: `rows`, `n` rows of the weight, `k` columns, `bits` of the factors of the form for all rows, `fp8`: rows are
quantised. A program makes BM rows by BN columns of the result, BK columns of both at a time.

MANY: of triton_rows.py; without it, the form for all rows. Both factors are FP8, and PARTS blocks of BN columns share
the rows. Tiles of GROUP times BM rows follow each other down the columns, so that a weight is read once for all of
them. PROGRAMS: as many take one tile after the other; 0: one each. DESC: the card's copy engine reads both factors
(NVIDIA's, sm_90). REGS: rows are multiplied from registers.
"""

from __future__ import annotations

from collections.abc import Mapping

Tile = dict[str, int]
Shape = Mapping[str, int]

_BLOCK = 128  # of FP8 scales, both ways
_FEWEST = 64  # rows for which more than the rule's tile is tried where no copy engine reads
_ENGINES = ("sm_90",)  # cards whose copy engine reads tiles
_UNITS = 132  # of such a card
_BUSY = 96  # programs that keep it busy, as an H200 said (docs/performance.md)


def fp8_linear_tile(shape: Shape, arch: str) -> Tile:
    """Choose by rows and columns: FP8 rows and weights of whole blocks where a copy engine reads both, else by rows."""
    if _for_many(shape) and arch in _ENGINES:  # for any number of rows: bits of a row were the same (docs/numerics.md)
        return _by_engine(shape)
    return _for_all(shape, arch)


def fp8_linear_tiles(shape: Shape, arch: str) -> list[Tile]:
    """List what may win for FP8 rows and weights of whole blocks."""
    if not _for_many(shape):
        return []
    rows = shape["rows"]
    if arch not in _ENGINES:
        sizes = [bm for bm in (64, 128) if bm <= rows]
        stages = 2 if arch.startswith("gfx") else 3
        return [_many(bm, 128, 1, warps, stages, GROUP=8) for bm in sizes for warps in (4, 8)]
    # Compiled for sm_90, none spills or has its matrix instructions serialised.
    large = [
        _many(128, 128, 1, 8, 4, DESC=1),
        _many(128, 128, 1, 8, 4, DESC=1, PROGRAMS=_UNITS),
        _many(128, 64, 2, 8, 4, DESC=1, PROGRAMS=_UNITS),
        _many(128, 64, 4, 8, 3, DESC=1),
        _many(128, 64, 4, 8, 4, DESC=1),
    ]
    small = [
        _many(64, 128, 1, 4, 4, DESC=1),
        _many(64, 128, 1, 4, 4, DESC=1, PROGRAMS=2 * _UNITS),
        _many(64, 64, 2, 4, 3, DESC=1, REGS=1),
        _many(64, 64, 4, 4, 2, DESC=1),
    ]
    # Few programs wait for memory: narrower tiles are more of them, and more stages ask for more at once.
    few = [_many(64, bn, 1, 4, stages, DESC=1) for bn, stages in ((128, 8), (64, 4), (64, 6), (64, 8))]
    return [*(large if rows >= 128 else ()), *small, *(few if _programs(shape) < 2 * _UNITS else ())]


def _for_many(shape: Shape) -> bool:
    """Say whether the form for many rows takes them."""
    return bool(shape["fp8"]) and shape["bits"] != 32 and shape["n"] % _BLOCK == 0 and shape["k"] % _BLOCK == 0


def _by_engine(shape: Shape) -> Tile:
    """Return the wide tile where there are enough to keep the card busy, else half of it."""
    return _many(64, 128, 1, 4, 4, DESC=1) if _programs(shape) >= _BUSY else _many(64, 64, 1, 4, 6, DESC=1)


def _programs(shape: Shape) -> int:
    """Return how many tiles of 64 rows and 128 columns there are."""
    return -(-shape["rows"] // 64) * (shape["n"] // 128)


def _for_all(shape: Shape, arch: str) -> Tile:
    """Choose by rows alone. float32 is for proofs, not for speed: it is unrolled into fused multiply-adds."""
    if shape["bits"] == 32:
        return _tile(16, 32, 4, 1)
    rows = next((size for size in (16, 32, 64) if shape["rows"] <= size), 128)
    deep = 128 if shape["bits"] == 8 else 64
    return _tile(rows, deep, 8 if rows >= 64 else 4, 2 if arch.startswith("gfx") else 3)


def _tile(rows: int, deep: int, warps: int, stages: int) -> Tile:
    """Return a tile of one block of scales, so that BK divides 128 too."""
    return {"MANY": 0, "BM": rows, "BN": _BLOCK, "BK": deep, "num_warps": warps, "num_stages": stages}


def _many(rows: int, columns: int, parts: int, warps: int, stages: int, **changes: int) -> Tile:
    tile = {"MANY": 1, "BM": rows, "BN": columns, "BK": _BLOCK, "PARTS": parts, "GROUP": 8, "PROGRAMS": 0}
    return tile | {"DESC": 0, "REGS": 0, "num_warps": warps, "num_stages": stages} | changes
