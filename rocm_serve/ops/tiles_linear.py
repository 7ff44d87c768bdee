"""Tiles of the plain product in Triton, by rule and to be tried; see tiles.py. No torch.

A shape: `rows`, `n` rows of the weight, `k` columns, `bytes` of the numbers multiplied. Four ways:

VENDOR: the library that torch calls. FEW with BM 0: each row alone, BN rows of the weight and BK columns at once. FEW
with BM: BM rows on the right of matrix instructions, inner columns cut among SPLITS programs, AHEAD of them asked for
before the rows are there (NVIDIA). Else a program makes BM rows by BN columns of the result, BK columns at a time.

Products that make their rows on the way (add_norm_linear, shared_down_add) have tiles of their own: BN rows of the
weight, whole, in the registers of num_warps; or, with BM, as FEW with BM above.
"""

from __future__ import annotations

from collections.abc import Mapping

Tile = dict[str, int]
Shape = Mapping[str, int]

_PROGRAMS = 256  # that a product should have: two for each unit of an H200, nearly one for each of an MI300X
_SHARED = 160 << 10  # bytes of tiles on their way in one program, at most
_MOST_FEW_ROWS = 64
_AHEAD = 128 << 10  # bytes that a program may ask for before its rows are there
FOLDED_ROWS = 4  # of a step, for which every program of a product may make a norm of what it multiplies
SHARED_ROWS = 64  # the same of the shared expert's hidden rows, which are shorter
_MOST_LANES = 1024  # of a program
_HELD = (16, 128)  # elements of a weight that a lane may hold: fewer are not worth a program, more do not fit
_HIDDEN = 64  # of hidden rows before they are multiplied, at most
_MADE = (8, 32)  # of a row: fewer do not lie as those of the weight, more do not fit beside them
VENDOR: Mapping[str, int] = {"VENDOR": 1}


def has_following(arch: str) -> bool:
    """Say whether a kernel can be put on the device while the one before ends: NVIDIA's, from sm_90 on."""
    return arch.startswith("sm_") and arch not in ("sm_80", "sm_86", "sm_89")


def linear_tile(shape: Shape, arch: str) -> Tile:
    """Cut a weight that few rows read into enough programs to have all of memory busy; many rows take the library."""
    if shape["bytes"] == 4:  # for proofs, not for speed: each step is unrolled into fused multiply-adds
        return _tile(16, 128, 32, 4, 1)
    if arch.startswith("sm_"):
        if shape["rows"] == 1:
            small = shape["k"] <= 512 or (shape["k"] <= 4096 and shape["n"] >= 8192)
            return _alone(shape, 4, 512, 1) if small else _alone(shape, 2, 2048, 4)
        return _split(shape) if shape["rows"] <= 16 else dict(VENDOR)
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
    found = [dict(VENDOR)] if arch.startswith("sm_") else []
    if shape["rows"] <= _MOST_FEW_ROWS:
        return found + _few_tiles(shape, gfx=gfx)
    if arch.startswith("sm_"):
        return found
    stages = (1, 2)
    if rows > 64:
        shapes = ((128, 32, 4), (128, 64, 4), (128, 64, 8), (256, 32, 8), (256, 64, 8))
        return [_tile(rows, columns, k, warps, s) for columns, k, warps in shapes for s in stages]
    return found


def folded_tile(shape: Shape, arch: str) -> Tile:
    """Give each lane 64 elements of the weight: as many loads on their way as a unit's registers hold."""
    deep, lanes = _power(shape["k"]), _lanes(arch)
    warps = max(1, min(8, deep // (16 * lanes)))
    rows = max(1, min(16, 64 * lanes * warps // deep))
    return _folded(rows, warps)


def folded_tiles(shape: Shape, arch: str) -> list[Tile]:
    """List tiles that may win: more rows of the weight in a program make what is multiplied less often."""
    found = []
    for warps in (1, 2, 4, 8, 16):
        lanes = warps * _lanes(arch)
        made = _power(shape["k"]) // lanes
        if lanes <= _MOST_LANES and _MADE[0] <= made <= _MADE[1]:
            found += [_folded(rows, warps) for rows in (1, 2, 4, 8, 16) if _HELD[0] <= rows * made <= _HELD[1]]
    return found


def shared_tile(shape: Shape, arch: str) -> Tile:
    """Multiply a few rows in place, more of them by matrix instructions: two programs for each unit, if there are."""
    if shape["rows"] <= FOLDED_ROWS:
        return folded_tile(shape, arch)
    if shape["bytes"] == 4:
        return _shared(shape, 16, 32, 2, 1)
    few = 16 if -(-shape["n"] // 32) < _PROGRAMS else 32
    if arch.startswith("gfx"):
        return _shared(shape, few, 128, 2, 2)
    return _shared(shape, few, 128, 2, 4) if shape["rows"] <= 16 else _shared(shape, 32, 128, 4, 2)


def shared_tiles(shape: Shape, arch: str) -> list[Tile]:
    """List tiles that may win at so many rows."""
    found = folded_tiles(shape, arch) if shape["rows"] <= FOLDED_ROWS else []
    if shape["rows"] > 1 and shape["bytes"] == 2:
        cuts = ((16, 128, 1), (16, 128, 2), (16, 256, 2), (32, 128, 2), (32, 128, 4), (64, 128, 4), (64, 64, 4))
        for columns, k, warps in cuts:
            if _rows_of_tile(shape) * k <= _HIDDEN * warps * _lanes(arch):
                found += [_shared(shape, columns, k, warps, s) for s in ((1, 2) if arch.startswith("gfx") else (2, 4))]
    return found


def _shared(shape: Shape, columns: int, k: int, warps: int, stages: int) -> Tile:
    return {"BM": _rows_of_tile(shape), "BN": columns, "BK": k, "num_warps": warps, "num_stages": stages}


def _folded(rows: int, warps: int) -> Tile:
    return {"BN": rows, "num_warps": warps, "num_stages": 1}


def _power(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()


def _lanes(arch: str) -> int:
    return 64 if arch.startswith("gfx") else 32


def _few_tiles(shape: Shape, *, gfx: bool) -> list[Tile]:
    rows, stages = _rows_of_tile(shape), (1, 2) if gfx else (4, 6)
    found: list[Tile] = []
    if shape["rows"] <= 2:
        found += [_alone(shape, *one) for one in ((2, 2048, 4), (4, 2048, 4), (4, 1024, 2), (4, 512, 1), (2, 4096, 4))]
    cuts = ((16, 256, 1), (16, 256, 2), (32, 128, 2), (64, 128, 4), (64, 64, 4), (128, 64, 4))
    for columns, k, warps in cuts:
        programs = -(-shape["n"] // columns)
        for splits in (1, 2, 4, 8):
            if 64 <= programs * splits <= 8 * _PROGRAMS and splits * k <= shape["k"]:
                tiles = [_left(shape, rows, columns, k, warps, s, splits) for s in stages]
                found += [tile | {"AHEAD": 0} for tile in tiles] if gfx else tiles
    return [one for one in found if 2 * (one["BM"] + one["BN"]) * one["BK"] * one["num_stages"] <= _SHARED]


def _rows_of_tile(shape: Shape) -> int:
    return next((size for size in (16, 32, 64) if shape["rows"] <= size), 128)


def _alone(shape: Shape, columns: int, k: int, warps: int) -> Tile:
    """Return the tile of rows alone; a row that is shorter than `k` has all of its columns at once."""
    deep = min(k, _power(shape["k"]))
    return {"FEW": 1, "BM": 0, "BN": columns, "BK": deep, "SPLITS": 1, "AHEAD": 0, "num_warps": warps, "num_stages": 1}


def _split(shape: Shape) -> Tile:
    """Return the tile of a few rows by rule: programs enough for every unit to have two."""
    splits = 1
    while splits < 4 and -(-shape["n"] // 32) * splits < _PROGRAMS and 512 * splits <= shape["k"]:
        splits *= 2
    return _left(shape, _rows_of_tile(shape), 32, 128, 2, 6, splits) | {"AHEAD": 0}


def _left(shape: Shape, rows: int, columns: int, k: int, warps: int, stages: int, splits: int) -> Tile:
    part = -(-shape["k"] // (splits * k)) * k
    ahead = 1
    while 2 * ahead <= part and 4 * ahead * columns <= _AHEAD and splits * part == shape["k"]:
        ahead *= 2
    ahead = ahead if ahead >= 64 else 0
    tile = {"FEW": 1, "BM": rows, "BN": columns, "BK": k, "SPLITS": splits, "AHEAD": ahead}
    return tile | {"num_warps": warps, "num_stages": stages}


def _tile(rows: int, columns: int, k: int, warps: int, stages: int) -> Tile:
    return {"BM": rows, "BN": columns, "BK": k, "num_warps": warps, "num_stages": stages}
