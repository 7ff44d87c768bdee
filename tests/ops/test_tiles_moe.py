"""Tiles of the routed experts: what is tried fits, and is what the kernels can run."""

from __future__ import annotations

from itertools import product

import pytest

from rocm_serve.ops import tiles
from rocm_serve.ops.tiles_moe import MOST_FEW_ROWS

SHAPES = {
    "35B": {"k": 8, "e": 256, "h": 2048, "i": 512},
    "2.4T on 8": {"k": 10, "e": 512, "h": 8192, "i": 256},
    "397B on 8": {"k": 10, "e": 512, "h": 4096, "i": 128},
}
SHARED_MEMORY = {"sm_90": 227 << 10, "gfx942": 64 << 10, "gfx950": 160 << 10}
ROWS = [1 << power for power in range(9)]
POINTS = list(product(SHAPES, ROWS, SHARED_MEMORY, (8, 16)))


def held(tile: tiles.Tile, part: str, arch: str) -> int:
    """Count the bytes of FP8 weights and rows that a kernel keeps in shared memory."""
    weights = 2 if part == "UP" and not tile["UP_SPLITS"] else 1
    stages = tile[f"{part}_STAGES"] if arch == "sm_90" else max(tile[f"{part}_STAGES"] - (arch == "gfx942"), 1)
    return stages * tile[f"{part}_UNROLL"] * 128 * (weights * tile[f"{part}_BN"] + tile["BM"])


@pytest.mark.parametrize(("shape", "rows", "arch", "bits"), POINTS)
def test_what_is_tried_fits_and_is_tried_once(shape: str, rows: int, arch: str, bits: int) -> None:
    tried = tiles.candidates("moe_experts", {**SHAPES[shape], "rows": rows, "bits": bits}, arch)
    assert all(one not in tried[:i] for i, one in enumerate(tried))
    for tile in tried:
        assert tile["FEW"] and tile.keys() == tried[0].keys()
        assert tile["UP_SPLITS"] or tile["UP_BN"] == 128, "a block of hidden columns is quantised by one program"
        assert held(tile, "UP", arch) <= SHARED_MEMORY[arch] and held(tile, "DOWN", arch) <= SHARED_MEMORY[arch], tile
        assert not tile["PDL"] or arch == "sm_90"
    assert {tile["PDL"] for tile in tried} == ({0, 1} if arch == "sm_90" else {0})
    assert arch != "sm_90" or {tile["UP_WARPS"] for tile in tried} >= {2, 4}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_rule_keeps_every_unit_busy_at_one_row_and_reads_weights_once_at_many(shape: str) -> None:
    one, many = (tiles.by_rule("moe_experts", {**SHAPES[shape], "rows": rows, "bits": 8}, "sm_90") for rows in (1, 256))
    programs = SHAPES[shape]["k"] * 2 * SHAPES[shape]["i"] // 128 * one["UP_SPLITS"]
    assert programs >= 132, "SMs of an H200"
    assert one["DIRECT"] and not (many["DIRECT"] or many["FUSED"])
    assert many["UP_SPLITS"] == 1 and one["UP_WARPS"] == many["UP_WARPS"] == 2, "sums of what is quantised next"


def test_more_rows_take_the_form_of_many() -> None:
    shape = {**SHAPES["35B"], "bits": 8}
    assert tiles.by_rule("moe_experts", {**shape, "rows": MOST_FEW_ROWS + 1}, "gfx942") == {"FEW": 0}
    assert tiles.candidates("moe_experts", {**shape, "rows": MOST_FEW_ROWS + 1}, "gfx942") == [{"FEW": 0}]
