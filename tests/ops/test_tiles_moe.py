"""Tiles of the routed experts: what is tried fits, and is what the kernels can run."""

from __future__ import annotations

from itertools import product

import pytest

from rocm_serve.ops import tiles
from rocm_serve.ops.tiles_moe import MOST_FEW_ROWS, MOST_ROWS_ALONE, MOST_ROWS_BY_BLOCKS

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
    by_blocks = [tile for tile in tried if tile.get("ALONE") == 2]
    assert bool(by_blocks) == (rows <= MOST_ROWS_BY_BLOCKS and bits == 8)
    for tile in by_blocks:
        early = {tile["UP_EARLY"], tile["DOWN_EARLY"]}
        assert early == {0} if arch != "sm_90" else 1 in early
        assert tile["UP_BITS"] == (16 if arch == "sm_90" else 8), "what gate and up make is quantised next"
        on_the_way = (tile["UP_STAGES"] - 1) * 2 * tile["UP_BN"] * tile["UP_COLUMNS"] * 128
        assert arch != "sm_90" or on_the_way <= 200 << 10, "and the row beside"
        in_registers = SHAPES[shape]["k"] * SHAPES[shape]["i"] * tile["DOWN_BN"]
        assert in_registers <= 256 * 32 * tile["DOWN_WARPS"]
    tried = [tile for tile in tried if tile not in by_blocks]
    alone = [tile for tile in tried if "ALONE" in tile]
    assert bool(alone) == (rows <= MOST_ROWS_ALONE)
    assert all(128 <= tile["UP_BK"] <= SHAPES[shape]["h"] and 128 % tile["UP_BN"] == 0 for tile in alone)
    tried = [tile for tile in tried if tile not in alone]
    for tile in tried:
        assert tile["FEW"] and tile.keys() == tried[0].keys()
        assert tile["UP_SPLITS"] or tile["UP_BN"] == 128, "a block of hidden columns is quantised by one program"
        assert held(tile, "UP", arch) <= SHARED_MEMORY[arch] and held(tile, "DOWN", arch) <= SHARED_MEMORY[arch], tile
        assert not tile["PDL"] or arch == "sm_90"
    assert {tile["PDL"] for tile in tried} == ({0, 1} if arch == "sm_90" else {0})
    if arch == "sm_90":  # four warps multiply FP8 as FP8 there, and what they sum is quantised next
        assert {tile["UP_WARPS"] for tile in tried} == ({2} if bits == 8 else {2, 4, 8} if rows > 16 else {2, 4})


@pytest.mark.parametrize("shape", SHAPES)
def test_a_rule_keeps_every_unit_busy_at_one_row_and_reads_weights_once_at_many(shape: str) -> None:
    one, many = (tiles.by_rule("moe_experts", {**SHAPES[shape], "rows": rows, "bits": 8}, "sm_90") for rows in (1, 256))
    programs = SHAPES[shape]["k"] * SHAPES[shape]["i"] // one["UP_BN"]
    assert programs * (1 if "ALONE" in one else 2 * one["UP_SPLITS"]) >= 132, "SMs of an H200"
    assert one.get("ALONE") == (1 if SHAPES[shape]["h"] <= 4096 else None)
    assert ("ALONE" in one or one["DIRECT"]) and not (many["DIRECT"] or many["FUSED"])
    assert many["UP_SPLITS"] == 1 and many["UP_WARPS"] == 2, "sums of what is quantised next"


def test_more_rows_take_the_form_of_many() -> None:
    shape = {**SHAPES["35B"], "bits": 8, "rows": MOST_FEW_ROWS + 1}
    assert not tiles.by_rule("moe_experts", shape, "gfx942")["FEW"]
    assert not any(tile["FEW"] for tile in tiles.candidates("moe_experts", shape, "gfx942"))
