"""Tiles of the routed experts in Triton, by rule and to be tried; see tiles.py. No torch.

A shape: `rows`, `k` choices a row, `e` experts here, `h` and `i` their widths, `bits` of the factors of a product. A
tile with FEW is of moe_experts/triton_few.py; one without is of triton_grouped.py, see tiles_moe_grouped.py.

BM: choices of an expert multiplied at once. DIRECT: every choice is a tile, nothing is put in order. FUSED: a program
goes through all experts of a row and sums. UP_*: the product with gate and up; UP_SPLITS ways along K, or 0: whole,
both in one program that quantises what they make. DOWN_*: the product with down. BN rows of a weight, UNROLL steps of
128 columns at a time, WARPS, STAGES. PDL: a kernel is put on the device while the one before ends, as NVIDIA's can be.
ALONE 1: of moe_experts/triton_alone.py, where UP_BK columns of UP_BN rows of gate and up are multiplied at once.
ALONE 2: of triton_alone_blocks.py, by matrix instructions: COLUMNS blocks at once, as BITS; MADE: what gate and up make
is quantised in a launch of its own. EARLY: the kernel after this one may come at once; down reads before it waits.

On sm_90, FP8 instructions (4 warps and more) keep 12 to 13 bits of a sum; what is quantised next then moves by a code
now and then (docs/numerics.md). Two warps multiply as float16, whose sums are float32: only those are tried there for
gate and up of few rows, up to MOST_FEW_ROWS.
"""

from __future__ import annotations

from collections.abc import Mapping

from rocm_serve.ops.tiles_linear import has_following
from rocm_serve.ops.tiles_moe_grouped import grouped_tile, grouped_tiles

Tile = dict[str, int]
Shape = Mapping[str, int]
Part = tuple[int, int, int, int]  # the numbers of one product, in the order of _KEYS

MOST_FEW_ROWS = 256
MOST_ROWS_ALONE = 2
MOST_ROWS_BY_BLOCKS = 4
_BYTES_OF_LANE = 256
_UNITS = 132  # of an H200; a rule needs the order of magnitude
_KEYS = ("BN", "WARPS", "STAGES", "UNROLL")


def moe_experts_tile(shape: Shape, arch: str) -> Tile:
    """Keep enough programs on every unit, with as few launches as that allows."""
    rows, width = shape["rows"], shape["i"]
    if rows > MOST_FEW_ROWS:
        return grouped_tile(shape, arch)
    if shape["bits"] == 32:  # for proofs, not for speed
        return _tile(16, 0, 0, 0, (128, 4, 1, 1), (128, 4, 1, 1))
    whole = _distinct(shape) * -(-width // 128)  # programs that make 128 columns of gate and of up
    splits = 0
    if whole < 1.5 * _UNITS:
        splits = min(8, 1 << round(max(_UNITS / whole, 1.0)).bit_length() - 1)
    alone = int(rows <= 4)
    if arch.startswith("gfx"):
        wide = (64 if shape["h"] >= 4096 else 32) if alone else 128
        return _tile(16, alone, alone, splits, (128, 4, 2, 1), (wide, 4, 2, 1))
    if rows == 1 and shape["h"] <= 4096 and has_following(arch):
        return _alone(shape, 8, 1024, 4, 8, 4)
    return _following(_tile(16, alone, 0, max(splits, 1), (64, 2, 6, 1), (128, 4, 4, 1)), arch)


def moe_experts_tiles(shape: Shape, arch: str) -> list[Tile]:
    """List pairs of a way up and a way down that may win at so many rows, the rule's among them."""
    rule = moe_experts_tile(shape, arch)
    if not rule["FEW"]:
        return grouped_tiles(shape, arch)
    if shape["bits"] == 32:
        return [rule]
    rows, at_once = shape["rows"], min(4, -(-shape["i"] // 128))
    few, some, many = (1, 2, 2) if arch.startswith("gfx") else (3, 4, 6)  # stages
    exact: list[tuple[int, Part]]
    ups: list[tuple[int, Part]] = [(0, (128, 4, few, 1)), (1, (128, 4, some, 1)), (1, (128, 4, few, 2))]
    inexact = shape["bits"] == 8 and has_following(arch)  # FP8 instructions: codes of hidden rows move
    if rows <= 4:
        ups += [(splits, (128, 4, some, 1)) for splits in (2, 4)]
        exact = [(splits, (64, 2, many, 1)) for splits in (1, 2, 4)] + [(2, (128, 2, some, 1)), (4, (128, 2, some, 1))]
    elif rows <= 16:
        ups += [(1, (64, 4, many, 1)), (2, (128, 4, some, 1))]
        exact = [(splits, (64, 2, many, 1)) for splits in (1, 2)] + [(1, (64, 2, some, 1)), (1, (128, 2, some, 1))]
    else:
        ups += [(0, (128, 8, some, 1)), (1, (256, 8, few, 1))]
        exact = [(1, (64, 2, many, 1)), (1, (64, 2, some, 1)), (1, (128, 2, some, 1)), (1, (128, 2, few, 1))]
    downs: list[tuple[int, Part]] = [(0, (128, 4, some, 1)), (0, (256, 8, few, 1)), (0, (128, 4, 2, 2))]
    if rows <= 4:
        downs = [(1, (32, 4, few, at_once)), (1, (64, 4, few, at_once)), (1, (64, 4, some, 1)), downs[0]]
    elif rows <= 16:
        downs += [(1, (64, 4, few, at_once))]
    direct = int(rows <= 4)
    found: list[Tile] = []
    for splits, up in [*exact, *(() if inexact else ups)]:
        found += [_tile(16, direct, fused, splits, up, down) for fused, down in downs]
    alone = _tiles_alone(shape, arch) if rows <= MOST_ROWS_ALONE else []
    alone += _tiles_by_blocks(shape, arch) if rows <= MOST_ROWS_BY_BLOCKS and shape["bits"] == 8 else []
    found = [_following(tile, arch) for tile in found]
    return [rule, *alone, *(found[0] | {"PDL": pdl} for pdl in (0, found[0]["PDL"])), *found]


def moe_route_tile(shape: Shape, arch: str) -> Tile:
    """Keep the kernel after the router's choice away until the end."""
    return {"EARLY": 0}


def moe_route_tiles(shape: Shape, arch: str) -> list[Tile]:
    """List both, where a kernel can be put on the device while the one before ends."""
    return [{"EARLY": early} for early in (0, 1)] if has_following(arch) else []


def _following(tile: Tile, arch: str) -> Tile:
    """Return the tile with PDL where the card has it."""
    return tile | {"PDL": int(has_following(arch))}


def _tiles_alone(shape: Shape, arch: str) -> list[Tile]:
    """List tiles of rows alone: how many bytes a program has on its way, and how many programs that makes."""
    ups = ((8, 1024, 4), (16, 1024, 8), (8, 512, 4), (4, 1024, 4), (8, 2048, 8), (8, 2048, 4))
    downs = ((8, 4), (8, 8), (4, 4), (16, 8))
    found = [_alone(shape, *up, *down) for up in ups for down in downs]
    return found + ([found[0] | {"EARLY": 1}] if has_following(arch) else [])


def _tiles_by_blocks(shape: Shape, arch: str) -> list[Tile]:
    """List pairs of a way up and a way down, then who may begin early; NVIDIA's float16 sums are those of float32.

    A program of down has all that it reads of weights in registers.
    """
    following = has_following(arch)
    columns, bits = (8, 16) if following else (16, 8)
    ups = ((16, 4, 3), (16, 8, 3), (8, 4, 3), (8, 4, 4), (32, 8, 3), (4, 2, 4))
    downs: list[tuple[int, ...]] = [(8, 4, 16, 8, 1), (8, 4, 16, 8, 0), (16, 8, 16, 8, 1), (16, 8, 16, 8, 0)]
    downs += [(16, 8, columns, bits, 0), (4, 2, columns, bits, 1), (32, 8, 16, 8, 0)]
    read = shape["k"] * -(-shape["i"] // 128) * 128  # bytes of a row of all weights of down
    downs = [down for down in downs if read * down[0] <= _BYTES_OF_LANE * 32 * down[1]]
    found = [_by_blocks(up, columns, bits, down, early=int(following)) for up in ups for down in downs]
    if following:
        found += [one | {f"{part}_EARLY": 0} for one in found[: len(downs)] for part in ("UP", "DOWN")]
    return found


def _by_blocks(up: tuple[int, int, int], columns: int, bits: int, down: tuple[int, ...], *, early: int) -> Tile:
    tile = {"FEW": 1, "ALONE": 2, "MADE": down[4], "UP_STAGES": up[2]}
    for part, sizes in (("UP", (*up[:2], columns, bits)), ("DOWN", down[:4])):
        names = (f"{part}_{name}" for name in ("BN", "WARPS", "COLUMNS", "BITS"))
        tile |= dict(zip(names, sizes, strict=True)) | {f"{part}_EARLY": early}
    return tile


def _alone(shape: Shape, up: int, deep: int, up_warps: int, down: int, down_warps: int) -> Tile:
    """Return the tile of rows alone; a row that is shorter than `deep` has all of its columns at once."""
    deep = max(128, min(deep, 1 << max(shape["h"] - 1, 0).bit_length()))
    sizes = {"UP_BN": up, "UP_BK": deep, "UP_WARPS": up_warps, "UP_STAGES": 3 if deep < shape["h"] else 1}
    return {"FEW": 1, "ALONE": 1, **sizes, "DOWN_BN": down, "DOWN_WARPS": down_warps}


def _distinct(shape: Shape) -> float:
    """Return how many experts rows touch when each chooses k at random: E (1 - (1 - k / E)^T)."""
    experts = shape["e"]
    return experts * (1.0 - max(0.0, 1.0 - shape["k"] / experts) ** shape["rows"])


def _tile(rows: int, direct: int, fused: int, splits: int, up: Part, down: Part) -> Tile:
    tile = {"FEW": 1, "BM": rows, "DIRECT": direct, "FUSED": fused, "PDL": 0, "UP_SPLITS": splits}
    tile |= {f"UP_{key}": size for key, size in zip(_KEYS, up, strict=True)}
    return tile | {f"DOWN_{key}": size for key, size in zip(_KEYS, down, strict=True)}
