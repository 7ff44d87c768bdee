"""Tiles of the experts of many rows in Triton, by rule and to be tried; see tiles_moe.py. No torch.

BM: choices of an expert multiplied at once. UP_*: the product with 128 rows of gate and 128 of up; HALVES: with 64 of
each at a time. DOWN_*: the product with down, RUN blocks of 128 columns a program; HELD: it keeps its hidden rows
meanwhile; HALVES: 64 columns at a time. SHORT: a tile that is at most half full is multiplied as half a tile. DESC: the
card's copy engine reads the weights (NVIDIA's, sm_90). REGS: rows are multiplied from registers. WARPS, STAGES.

TILED: hidden rows lie in the order of the tiles. Then the copy engine can read them too, and DOWN_PROGRAMS programs, if
it is not 0, take one block of columns after the other.

A weight is 128 rows at a time throughout: one block of FP8 scales, and one block of hidden columns that is quantised.
"""

from __future__ import annotations

from collections.abc import Mapping

Tile = dict[str, int]
Shape = Mapping[str, int]

BN = 128  # rows of a weight
ENGINES = ("sm_90",)  # cards whose copy engine reads tiles
_UNITS = 132  # of such a card
_HELD_BLOCKS = 4  # of hidden columns that a program can keep


def grouped_tile(shape: Shape, arch: str) -> Tile:
    """Choose by how many rows an expert gets, chosen at random."""
    if shape["bits"] == 32:  # for proofs, not for speed
        return _tile(16, (4, 1), (4, 1), DOWN_HELD=int(_depth(shape) <= _HELD_BLOCKS), DOWN_RUN=2)
    rows = shape["rows"] * shape["k"] / shape["e"]
    bm = next((size for most, size in ((16, 16), (32, 32), (96, 64)) if rows <= most), 128)
    return _of_size(bm, shape, arch)


def grouped_tiles(shape: Shape, arch: str) -> list[Tile]:
    """List what may win at so many rows, the rule's among them."""
    rule = grouped_tile(shape, arch)
    if shape["bits"] == 32:
        return [rule]
    found = [rule]
    for size in sorted({max(16, rule["BM"] // 2), rule["BM"], min(128, rule["BM"] * 2)}):
        tile = _of_size(size, shape, arch)
        found += [tile, tile | {"DOWN_HELD": 0, "DOWN_RUN": 1, "DOWN_SHORT": 0, "DOWN_STAGES": tile["UP_STAGES"]}]
        if arch.startswith("gfx"):
            found += [tile | {"TILED": 1}]
        else:
            found += [tile | {"UP_STAGES": tile["UP_STAGES"] - 1}]
            found += [tile | {"DOWN_RUN": 8}] if tile["DOWN_HELD"] else []
        if tile["UP_DESC"] and shape["rows"] * shape["k"] >= 64 * shape["e"]:
            found += [tile | way for way in _ways_down(tile, _depth(shape))]
        if tile["UP_DESC"] and size == 64:  # two programs of four warps share a unit: one rescales, one multiplies
            up = tile | {"UP_WARPS": 4, "UP_STAGES": 2, "UP_HALVES": 1, "UP_REGS": 1}
            found += [up, up | {"UP_STAGES": 3}, *(up | way for way in _ways_down(tile, _depth(shape)))]
    return [tile for i, tile in enumerate(found) if tile not in found[:i]]


def _ways_down(tile: Tile, depth: int) -> list[Tile]:
    """List ways down for rows in the order of tiles of 64 or 128. Compiled for sm_90, none has its matrix instructions
    serialised for want of registers, as the rule's has at 128 rows and four steps."""
    turns = {"TILED": 1, "DOWN_HELD": 0, "DOWN_RUN": 1, "DOWN_SHORT": 0, "DOWN_DESC": 1, "DOWN_STAGES": 4}
    two = {"DOWN_WARPS": 4, "DOWN_PROGRAMS": 2 * _UNITS} if tile["BM"] == 64 else {"DOWN_PROGRAMS": _UNITS}
    found = [turns | two, turns | {"DOWN_HALVES": 1, "DOWN_PROGRAMS": tile["DOWN_WARPS"] // 4 * _UNITS}]
    if depth <= _HELD_BLOCKS:
        held = {"DOWN_HELD": 1, "DOWN_RUN": 16, "DOWN_SHORT": 0, "DOWN_HALVES": 1, "DOWN_STAGES": 2}
        if tile["BM"] == 64:
            held |= {"DOWN_WARPS": 4}
        engine = held | {"DOWN_DESC": 1}
        found += [held, held | {"TILED": 1, "DOWN_REGS": 1}, engine, engine | {"DOWN_STAGES": 3}]
    return found


def _of_size(bm: int, shape: Shape, arch: str) -> Tile:
    """Return the tile of `bm` choices: 16, 32, 64 or 128."""
    warps, depth = 8 if bm >= 64 else 4, _depth(shape)
    if arch.startswith("gfx"):
        if shape["bits"] == 16:  # 128 rows do not fit the registers of gfx950
            bm = min(bm, 64)
        return _tile(bm, (warps, 2), (warps, 2), UP_HALVES=int(bm == 128))
    desc = int(arch in ENGINES and shape["bits"] == 8)
    if bm < 64:  # matrix instructions that read rows of weights from registers
        return _tile(bm, (4, 4), (4, 4))
    if bm == 64:
        held = int(depth <= _HELD_BLOCKS)
        tile = _tile(bm, (8, 4), (8, 2 if held else 3), DOWN_HELD=held, DOWN_RUN=16 if held else 1)
        return tile | {"UP_DESC": desc}
    tile = _tile(bm, (8, 3), (8, 3), UP_HALVES=1, UP_SHORT=1, UP_DESC=desc)
    if depth <= 2:
        return tile | {"DOWN_HELD": 1, "DOWN_RUN": 16, "DOWN_SHORT": 1}
    if depth <= _HELD_BLOCKS:
        return tile | {"DOWN_HELD": 1, "DOWN_RUN": 16, "DOWN_STAGES": 2}
    return tile | {"DOWN_DESC": desc}


def deep_of(bits: int) -> int:
    """Return how many columns are multiplied at once: whole blocks of FP8 scales, or parts of them."""
    return {8: 128, 16: 64, 32: 32}[bits]


def _depth(shape: Shape) -> int:
    """Return the steps along the hidden columns."""
    return -(-shape["i"] // deep_of(shape["bits"]))


def _tile(bm: int, up: tuple[int, int], down: tuple[int, int], **changes: int) -> Tile:
    tile = {"FEW": 0, "BM": bm, "TILED": 0, "DOWN_HELD": 0, "DOWN_RUN": 1, "DOWN_PROGRAMS": 0}
    for part, (warps, stages) in (("UP", up), ("DOWN", down)):
        tile |= {f"{part}_WARPS": warps, f"{part}_STAGES": stages}
        tile |= {f"{part}_{name}": 0 for name in ("DESC", "SHORT", "HALVES", "REGS")}
    return tile | changes
