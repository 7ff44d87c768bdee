"""Tiles of attention_prefill in Triton, by rule and to be tried; see tiles.py. No torch.

A shape: `rows` of the longest sequence, `vectors` query heads that share a key/value head (padded to a power of two),
`d` their padded size, `bytes` of a number that is multiplied. In a tile, BLOCK_M rows times heads meet BLOCK_N keys;
DESCRIBED: keys are loaded by tensor descriptors.
"""

from __future__ import annotations

from collections.abc import Mapping

Tile = dict[str, int]
Shape = Mapping[str, int]

KEY_UNIT = 128  # the copied keys of a sequence are padded to a multiple of it: whole blocks of every tile
_UNITS = {"sm_90": 132, "gfx942": 304, "gfx950": 256}  # of a card; one tile fills one
MOST_UNITS = max(_UNITS.values())
_LEAST_KEYS, _MOST_SPLITS = 512, 64  # of a split; of a sequence
KEYS_AT_A_TIME = 1 << 17  # copied before the sequences that own them are attended to, unless one alone has more


def copied_keys(longest: int, many: int) -> int:
    """Return how many keys are copied at a time at most, of `many` sequences that are not longer than `longest`."""
    padded = -(-longest // KEY_UNIT) * KEY_UNIT
    return max(padded, min(KEYS_AT_A_TIME, many * padded))


def prefill_splits(programs: int, keys: int, arch: str) -> int:
    """Return in how many splits the keys of sequences are cut so that all units have work. `keys`: of the longest."""
    return max(1, min(_UNITS.get(arch, 1) // programs, keys // _LEAST_KEYS, _MOST_SPLITS))


def attention_prefill_tile(shape: Shape, arch: str) -> Tile:
    """Take 128 rows where there are as many: every key is read once for all of them. What is wide stays narrow.

    float32 is for proofs, not for speed: without matrix instructions a tile is unrolled into fused multiply-adds.
    """
    d, vectors = shape["d"], shape["vectors"]
    if shape["bytes"] == 4:
        return _tile(max(16, vectors), 32 if d <= 64 else 16, 0, 4, 1)
    if arch.startswith("gfx"):
        block_m = max(vectors, 16, min(128, shape["rows"] * vectors))
        # With eight warps registers spill on gfx942: compiled, not timed.
        return _tile(block_m, 64 if d <= 128 else 32, 0, 8 if block_m >= 128 and arch == "gfx950" else 4, 1)
    block_m = max(vectors, 64, min(128, shape["rows"] * vectors))
    return _tile(block_m, 64, int(arch == "sm_90"), block_m // 16, 2 if arch == "sm_90" else 1)


def attention_prefill_tiles(shape: Shape, arch: str) -> list[Tile]:
    """List tiles of 32 to 128 keys whose copies in flight fit into what a unit has."""
    if shape["bytes"] == 4:
        return []
    gfx, row = arch.startswith("gfx"), shape["d"] * shape["bytes"]
    room = (64 if gfx else 224 if arch == "sm_90" else 160) << 10
    found = []
    for block_m in (64, 128, 256) if gfx else (64, 128):
        for block_n in (16, 32, 64, 128):
            for stages in (1, 2) if gfx else (1, 2, 3, 4):
                held = 0 if gfx else block_m * row  # gfx keeps its queries in registers
                if block_m >= shape["vectors"] and held + 2 * block_n * row * stages <= room:
                    warps = (4, 8) if gfx else (block_m // 16,)
                    found += [_tile(block_m, block_n, int(arch == "sm_90"), w, stages) for w in warps]
    return found


def _tile(block_m: int, block_n: int, described: int, warps: int, stages: int) -> Tile:
    return {
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "DESCRIBED": described,
        "num_warps": warps,
        "num_stages": stages,
    }
