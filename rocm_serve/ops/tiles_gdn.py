"""Tiles of Gated DeltaNet in Triton, by rule and to be tried; see tiles.py. No torch.

A shape: `rows` sequences, `heads` value heads, sizes `k` and `v` of a head. A tile holds BV value rows of one head's
state in registers and reads them KL columns at a time: KL / 4 lanes share a row. Fewer of them need fewer shuffles for
its sums, and more registers for q and k.
"""

from __future__ import annotations

from collections.abc import Mapping

Tile = dict[str, int]
Shape = Mapping[str, int]


def gdn_decode_tile(shape: Shape, arch: str) -> Tile:
    """Cut heads small while they are few, so that every unit has some: `rows` sequences of `heads` value heads."""
    heads = shape["rows"] * shape["heads"]
    return _state_tile(shape, 2048 if heads <= 64 else 4096)


def gdn_chunk_tile(shape: Shape, arch: str) -> Tile:
    """Cut heads small while they are few, so that every unit carries some value dimensions through a prompt."""
    values, heads = 64, shape["rows"] * shape["heads"]
    while values > 16 and (heads * -(-shape["v"] // values) < 128 or values >= 2 * shape["v"]):
        values //= 2
    gfx = arch.startswith("gfx")
    return {"BV": values, "num_warps": 4, "num_stages": 1 if gfx else 3, "SPLIT": int(gfx)}


def gdn_chunk_tiles(shape: Shape, arch: str) -> list[Tile]:
    """List parts of a head of 16 value dimensions and more.

    SPLIT: a launch of its own solves the systems of sub-chunks, which takes fewer registers.
    """
    # One stage went wrong on an H200 (Triton 3.6: once 10 times the result, once an illegal access). Not by spills:
    # compiled for sm_90, such tiles of 8 warps and up to 64 dimensions have none. Tiles of 128 spill at any depth.
    stages, most = ((2, 3, 4), 64) if arch.startswith("sm_") else ((1, 2), 128)
    return [
        {"BV": values, "num_warps": warps, "num_stages": depth, "SPLIT": split}
        for values in (16, 32, 64, 128)
        for warps in (4, 8)
        for depth in stages
        for split in (0, 1)
        if values <= min(most, max(16, _power_of_two(shape["v"])))
    ]


def gdn_scan_tile(shape: Shape, arch: str) -> Tile:
    return _state_tile(shape, 4096)


def gdn_drafts_tile(shape: Shape, arch: str) -> Tile:
    """Give a warp of NVIDIA 2048 floats of a state: rows come one after the other, and many small programs hide that.

    On an H200 16 value rows of 128 in one warp took 0.66 of the time of 32 in four at one request, 0.3 at 16.
    """
    tile = _state_tile(shape, 2048 if arch.startswith("sm_") else 4096)
    return tile | {"num_warps": 1} if arch.startswith("sm_") else tile


def gdn_step_tile(shape: Shape, arch: str) -> Tile:
    """Keep heads whole: one launch then does all. Two of 128 x 128 fit an NVIDIA unit, in 128 registers a lane."""
    tile = _state_tile(shape, 16384)
    return tile | {"maxnreg": 128} if arch.startswith("sm_") and tile["num_warps"] == 8 else tile


def gdn_tiles(shape: Shape, arch: str) -> list[Tile]:
    """List tiles of 16 to 64 floats of the state a lane."""
    keys, lanes = _power_of_two(shape["k"]), 64 if arch.startswith("gfx") else 32
    return [
        {"BV": values, "KL": min(keys, 32), "num_warps": warps}
        for values in (16, 32, 64, 128)
        for warps in (1, 2, 4, 8, 16)
        if values <= _power_of_two(shape["v"]) and 16 <= values * keys // (warps * lanes) <= 64
    ]


def gdn_step_tiles(shape: Shape, arch: str) -> list[Tile]:
    """List those of 32 value rows or more, which convolve q and k seldom enough; on NVIDIA capped ones as well."""
    tiles = [tile for tile in gdn_tiles(shape, arch) if tile["BV"] >= min(32, _power_of_two(shape["v"]))]
    full = [tile for tile in tiles if tile["BV"] * _power_of_two(shape["k"]) == 2048 * tile["num_warps"]]
    return tiles + [tile | {"maxnreg": 128} for tile in full if arch.startswith("sm_")]


def _state_tile(shape: Shape, elements: int) -> Tile:
    """Cut `elements` of a recurrent state out of one head: BV value rows of all keys, KL columns of a row at a time."""
    keys = _power_of_two(shape["k"])
    values = max(1, min(_power_of_two(shape["v"]), elements // keys))
    return {"BV": values, "KL": min(keys, 32), "num_warps": max(1, min(8, values * keys // 1024))}


def _power_of_two(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()
