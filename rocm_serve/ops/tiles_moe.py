"""Tiles of the routed experts in Triton, by rule and to be tried; see tiles.py. No torch.

A shape: `rows`, `k` choices a row, `e` experts here, `h` and `i` their widths, `bits` of the factors of a product. A
tile with FEW is of moe_experts/triton_few.py; one without is of triton_grouped.py, which chooses its own.

BM: choices of an expert multiplied at once. DIRECT: every choice is a tile, nothing is put in order. FUSED: a program
goes through all experts of a row and sums. UP_*: the product with gate and up; UP_SPLITS ways along K, or 0: whole,
both in one program that quantises what they make. DOWN_*: the product with down. BN rows of a weight, UNROLL steps of
128 columns at a time, WARPS, STAGES. PDL: a kernel is put on the device while the one before ends, as NVIDIA's can be.
"""

from __future__ import annotations

from collections.abc import Mapping

Tile = dict[str, int]
Shape = Mapping[str, int]
Part = tuple[int, int, int, int]  # the numbers of one product, in the order of _KEYS

MOST_FEW_ROWS = 256
_UNITS = 132  # of an H200; a rule needs the order of magnitude
_KEYS = ("BN", "WARPS", "STAGES", "UNROLL")


def moe_experts_tile(shape: Shape, arch: str) -> Tile:
    """Keep enough programs on every unit, with as few launches as that allows."""
    rows, width = shape["rows"], shape["i"]
    if rows > MOST_FEW_ROWS:
        return {"FEW": 0}
    if shape["bits"] == 32:  # for proofs, not for speed
        return _tile(16, 0, 0, 0, (128, 4, 1, 1), (128, 4, 1, 1))
    whole = _distinct(shape) * -(-width // 128)  # programs that make 128 columns of gate and of up
    splits = 0
    if whole < 1.5 * _UNITS:
        splits = min(8, 1 << round(max(_UNITS / whole, 1.0)).bit_length() - 1)
    alone = int(rows <= 4)
    wide = (64 if shape["h"] >= 4096 else 32) if alone else 128
    at_once = min(4, -(-width // 128)) if alone else 1
    if arch.startswith("gfx"):
        return _tile(16, alone, alone, splits, (128, 4, 2, 1), (wide, 4, 2, 1))
    up = (128, 4, 4 if splits else 3, 1)
    return _tile(_rows_of_tile(shape), alone, alone, splits, up, (wide, 4, 3 if alone else 4, at_once))


def moe_experts_tiles(shape: Shape, arch: str) -> list[Tile]:
    """List pairs of a way up and a way down that may win at so many rows, the rule's among them."""
    rule = moe_experts_tile(shape, arch)
    if shape["bits"] == 32 or not rule["FEW"]:
        return [rule]
    rows, at_once = shape["rows"], min(4, -(-shape["i"] // 128))
    few, some, many = (1, 2, 2) if arch.startswith("gfx") else (3, 4, 6)  # stages
    ups: list[tuple[int, Part]] = [(0, (128, 4, few, 1)), (1, (128, 4, some, 1)), (1, (128, 4, few, 2))]
    if rows <= 4:
        ups += [(splits, (128, 4, some, 1)) for splits in (2, 4, 8)] + [(4, (64, 4, few, 2))]
    elif rows <= 16:
        ups += [(0, (128, 8, some, 1)), (1, (64, 4, many, 1)), (2, (128, 4, some, 1))]
    else:
        ups += [(0, (128, 8, some, 1)), (0, (128, 4, 2, 1)), (1, (256, 8, few, 1))]
    downs: list[tuple[int, Part]] = [(0, (128, 4, some, 1)), (0, (256, 8, few, 1)), (0, (128, 4, 2, 2))]
    if rows <= 4:
        downs = [(1, (32, 4, few, at_once)), (1, (64, 4, few, at_once)), (1, (64, 4, some, 1)), downs[0]]
    elif rows <= 16:
        downs += [(1, (64, 4, few, at_once))]
    direct = int(rows <= 4)
    found = []
    for rows_of_tile in (16, 32) if rows > 64 else (16,):
        for splits, up in ups:
            found += [_tile(rows_of_tile, direct, fused, splits, up, down) for fused, down in downs]
    if not arch.startswith("sm_") or arch < "sm_90":
        return [rule, *found]
    close = [tile for tile in found if _parts_that_differ(tile, rule) < 2]
    return [rule, *close, *(tile | {"PDL": 1} for tile in [rule, *found])]


def _parts_that_differ(tile: Tile, other: Tile) -> int:
    """Count what differs: the way up, the way down, the rest."""
    names = {"U": 0, "D": 0, "rest": 0}
    for key, size in tile.items():
        part = "U" if key.startswith("UP") else "D" if key.startswith("DOWN") or key == "FUSED" else "rest"
        names[part] |= size != other[key]
    return sum(names.values())


def _rows_of_tile(shape: Shape) -> int:
    """16 until experts often get more choices than that; then weights would be read twice."""
    return 16 if shape["rows"] * shape["k"] <= 10 * shape["e"] else 32


def _distinct(shape: Shape) -> float:
    """Return how many experts rows touch when each chooses k at random: E (1 - (1 - k / E)^T)."""
    experts = shape["e"]
    return experts * (1.0 - max(0.0, 1.0 - shape["k"] / experts) ** shape["rows"])


def _tile(rows: int, direct: int, fused: int, splits: int, up: Part, down: Part) -> Tile:
    tile = {"FEW": 1, "BM": rows, "DIRECT": direct, "FUSED": fused, "PDL": 0, "UP_SPLITS": splits}
    tile |= {f"UP_{key}": size for key, size in zip(_KEYS, up, strict=True)}
    return tile | {f"DOWN_{key}": size for key, size in zip(_KEYS, down, strict=True)}
