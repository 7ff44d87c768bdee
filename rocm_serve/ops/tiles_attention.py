"""Tiles of attention in Triton, by rule and to be tried; see tiles.py. No torch.

A shape of attention_decode: `rows` sequences, `vectors` query vectors of a tile, `groups` key/value heads, `d` their
padded size, `bytes` of a number in the pages (4 where float32 is multiplied).
"""

from __future__ import annotations

from collections.abc import Mapping

Tile = dict[str, int]
Shape = Mapping[str, int]

_PROGRAMS = 256  # that share the keys of a step: two for each unit of an H200, nearly one for each of an MI300X
_MAX_SPLITS = 256
_BLOCKS = (8 << 10, 32 << 10)  # bytes of a block of keys, at least and at most


def attention_decode_tile(shape: Shape, arch: str) -> Tile:
    """Split each sequence's keys until there are enough programs; 16 KiB of keys a block at most, and of values.

    Page numbers are read a stage ahead of what stands there: of 5 stages two are blocks under way.
    """
    if shape["bytes"] == 4:  # for proofs, not for speed
        return _tile(min(2, _splits(shape)), 16, 1, 4, 1)
    gfx = arch.startswith("gfx")
    keys = max(16, min(32 if gfx else 64, (16 << 10) // (shape["d"] * shape["bytes"])))
    # To turn FP8 numbers into wider ones takes instructions, and many query vectors take registers.
    warps = 8 if not gfx and (shape["bytes"] == 1 or shape["vectors"] > 16) else 4
    return _tile(_splits(shape), keys, 1, warps, 1 if gfx else 5)


def attention_decode_tiles(shape: Shape, arch: str) -> list[Tile]:
    """List half to four times the splits of the rule, and blocks of all sizes; keys first where that fills 64 rows."""
    if shape["bytes"] == 4:
        return []
    gfx, splits = arch.startswith("gfx"), _splits(shape)
    blocks = [(n, 1, w, s) for n in (16, 32, 64, 128) for w in (4, 8) for s in ((1, 2) if gfx else (3, 5, 7))]
    if not gfx and shape["bytes"] == 2:
        blocks += [(64, 0, w, s) for w in (4, 8) for s in (3, 5)]
    return [
        _tile(some, *block)
        for some in (splits // 2, splits, splits * 2, splits * 4)
        for block in blocks
        if 1 <= some <= _MAX_SPLITS and _BLOCKS[0] <= block[0] * shape["d"] * shape["bytes"] <= _BLOCKS[1]
    ]


def _splits(shape: Shape) -> int:
    wanted = max(1, _PROGRAMS // max(1, shape["rows"] * shape["groups"]))
    return min(_MAX_SPLITS, 1 << wanted.bit_length() - 1)


def _tile(splits: int, keys: int, axis: int, warps: int, stages: int) -> Tile:
    return {"SPLITS": splits, "BLOCK_N": keys, "KEY": axis, "num_warps": warps, "num_stages": stages}
