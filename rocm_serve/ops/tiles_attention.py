"""Tiles of attention in Triton, by rule and to be tried; see tiles.py. No torch.

A shape of attention_decode: `rows` sequences, `vectors` query vectors of a tile, `groups` key/value heads, `d` their
padded size, `bytes` of a number in the pages (4 where float32 is multiplied).
"""

from __future__ import annotations

from collections.abc import Mapping

Tile = dict[str, int]
Shape = Mapping[str, int]

_PROGRAMS = 256  # that share the keys of a step: nearly one for each unit of an MI300X
_PROGRAMS_SM90 = 128  # one for each unit of an H200, with blocks of twice the bytes: 1.05 to 1.34 times faster there
_MAX_SPLITS = 256
_BLOCKS = (8 << 10, 32 << 10)  # bytes of a block of keys, at least and at most


def attention_decode_tile(shape: Shape, arch: str) -> Tile:
    """Split each sequence's keys until there are enough programs; 16 KiB of keys a block at most, and of values.

    Twice that on sm_90, where few query vectors leave room. Page numbers are read a stage ahead of what stands there:
    of 5 stages two are blocks under way.
    """
    if shape["bytes"] == 4:  # for proofs, not for speed
        return _tile(min(2, _splits(shape, arch)), 16, 1, 4, 1)
    gfx, wide = arch.startswith("gfx"), _wide(shape, arch)
    most = 128 // shape["bytes"] if wide else 32 if gfx else 64
    keys = max(16, min(most, ((32 if wide else 16) << 10) // (shape["d"] * shape["bytes"])))
    # To turn FP8 numbers into wider ones takes instructions, and many query vectors take registers.
    warps = 8 if not (gfx or wide) and (shape["bytes"] == 1 or shape["vectors"] > 16) else 4
    return _tile(_splits(shape, arch), keys, 1, warps, 1 if gfx else 5)


def attention_decode_tiles(shape: Shape, arch: str) -> list[Tile]:
    """List half to four times the splits of the rule, and blocks of all sizes; keys first where that fills 64 rows."""
    if shape["bytes"] == 4:
        return []
    gfx, splits = arch.startswith("gfx"), _splits(shape, arch)
    blocks = [(n, 1, w, s) for n in (16, 32, 64, 128) for w in (4, 8) for s in ((1, 2) if gfx else (3, 5, 7))]
    if not gfx and shape["bytes"] == 2:
        blocks += [(64, 0, w, s) for w in (4, 8) for s in (3, 5)]
    return [
        _tile(some, *block)
        for some in (splits // 2, splits, splits * 2, splits * 4)
        for block in blocks
        if 1 <= some <= _MAX_SPLITS and _BLOCKS[0] <= block[0] * shape["d"] * shape["bytes"] <= _BLOCKS[1]
    ]


def _wide(shape: Shape, arch: str) -> bool:
    """Whether two blocks of 32 KiB of keys, and of values, fit a unit's memory, and their sums its registers.

    With 16 query vectors of 256 compiled code needs all 255 of a lane, and more.
    """
    return arch == "sm_90" and shape["vectors"] <= 8


def _splits(shape: Shape, arch: str) -> int:
    programs = _PROGRAMS_SM90 if _wide(shape, arch) else _PROGRAMS
    wanted = max(1, programs // max(1, shape["rows"] * shape["groups"]))
    return min(_MAX_SPLITS, 1 << wanted.bit_length() - 1)


def _tile(splits: int, keys: int, axis: int, warps: int, stages: int) -> Tile:
    return {"SPLITS": splits, "BLOCK_N": keys, "KEY": axis, "num_warps": warps, "num_stages": stages}
