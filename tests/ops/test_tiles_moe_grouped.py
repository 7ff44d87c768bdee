"""Tiles of the experts of many rows: they fit a card's shared memory, and are what the kernels can run."""

from __future__ import annotations

from itertools import product

import pytest

from rocm_serve.ops import tiles
from rocm_serve.ops.tiles_moe import MOST_FEW_ROWS
from rocm_serve.ops.tiles_moe_grouped import BN, deep_of
from tests.ops.test_tiles_moe import SHAPES, SHARED_MEMORY

ROWS = [MOST_FEW_ROWS << power for power in range(1, 8)]
POINTS = list(product(SHAPES, ROWS, SHARED_MEMORY, (8, 16)))
OUT_BYTES = 2  # a result waits in shared memory for its store


def held(tile: tiles.Tile, part: str, shape: dict[str, int], arch: str) -> int:
    """Count the bytes of weights, rows and results that a kernel keeps in shared memory."""
    deep, size = deep_of(shape["bits"]), shape["bits"] // 8
    # gfx942 keeps one stage of two in registers
    stages = tile[f"{part}_STAGES"] - (arch == "gfx942")
    if part == "UP":
        return stages * (2 * BN + tile["BM"]) * deep * size
    if not tile["DOWN_HELD"]:
        return stages * (BN + tile["BM"]) * deep * size
    depth = -(-shape["i"] // deep)
    rows = tile["BM"] * (2 if tile["DOWN_SHORT"] else 1)
    return depth * deep * size * (rows + stages * BN) + OUT_BYTES * BN * tile["BM"]


@pytest.mark.parametrize(("name", "rows", "arch", "bits"), POINTS)
def test_what_is_tried_fits_and_is_tried_once(name: str, rows: int, arch: str, bits: int) -> None:
    shape = {**SHAPES[name], "rows": rows, "bits": bits}
    tried = [tile for tile in tiles.candidates("moe_experts", shape, arch) if not tile["FEW"]]
    assert tried and all(one not in tried[:i] for i, one in enumerate(tried))
    for tile in tried:
        assert tile.keys() == tried[0].keys()
        assert tile["BM"] >= 32 or not (tile["UP_SHORT"] or tile["DOWN_SHORT"]), "half a tile is 16 rows at least"
        assert not (tile["UP_DESC"] or tile["DOWN_DESC"]) or (arch == "sm_90" and bits == 8)
        assert max(held(tile, part, shape, arch) for part in ("UP", "DOWN")) <= SHARED_MEMORY[arch], tile


@pytest.mark.parametrize("arch", SHARED_MEMORY)
def test_tiles_grow_with_the_rows_that_an_expert_gets(arch: str) -> None:
    shape = {**SHAPES["35B"], "bits": 8}
    sizes = [tiles.by_rule("moe_experts", {**shape, "rows": rows}, arch)["BM"] for rows in ROWS]
    assert sizes == sorted(sizes) and sizes[-1] == 128


def test_float32_has_tiles_of_16() -> None:
    tile = tiles.by_rule("moe_experts", {**SHAPES["35B"], "rows": 4096, "bits": 32}, "sm_90")
    assert tile["BM"] == 16 and not tile["UP_DESC"]
