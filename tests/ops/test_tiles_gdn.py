"""Tiles of Gated DeltaNet's kernels: what a kernel can run, at the sizes of models and at odd ones."""

from __future__ import annotations

import pytest

from rocm_serve.ops import tiles

KERNELS = ("gdn_scan", "gdn_decode", "gdn_step", "gdn_step_drafts")
SHAPES = [
    {"rows": rows, "heads": heads, "k": k, "v": v}
    for rows in (1, 16, 256)
    for heads, k, v in ((32, 128, 128), (16, 128, 128), (3, 20, 37), (1, 8, 8), (4, 256, 512))
]


@pytest.mark.parametrize("arch", ["gfx942", "sm_90"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_tile_has_powers_of_two_that_a_head_can_be_cut_into(kernel: str, arch: str) -> None:
    for shape in SHAPES:
        for tile in tiles.candidates(kernel, shape, arch):
            assert all(size & (size - 1) == 0 < size for size in tile.values()), tile
            assert tile["KL"] <= 2 * shape["k"] and tile["BV"] < 2 * shape["v"], (shape, tile)
            assert tile["num_warps"] * 32 <= 1024 and ("maxnreg" in tile) <= arch.startswith("sm_")


@pytest.mark.parametrize("arch", ["gfx942", "sm_90"])
def test_tiles_of_prompts_fit_matrix_instructions(arch: str) -> None:
    for shape in SHAPES[:-1]:
        found = tiles.candidates("gdn_chunk", shape, arch)
        for tile in found:
            assert all(tile[name] & (tile[name] - 1) == 0 for name in ("BV", "num_warps")), tile
            assert 16 <= tile["BV"] <= max(16, 2 * shape["v"] - 1) and tile["num_warps"] >= 4
            assert (tile["num_stages"] > 1 and tile["BV"] <= 64) if arch == "sm_90" else tile["num_stages"] <= 2
        assert len(found) == len({tuple(sorted(tile.items())) for tile in found}) > 2


@pytest.mark.parametrize("arch", ["gfx942", "sm_90"])
def test_a_step_keeps_a_head_whole_and_drafts_do_not(arch: str) -> None:
    for shape in SHAPES[:2]:
        assert tiles.by_rule("gdn_step", shape, arch)["BV"] == shape["v"]
        assert tiles.by_rule("gdn_step_drafts", shape, arch)["BV"] < shape["v"]


def test_a_step_may_be_given_parts_of_heads_and_fewer_registers() -> None:
    found = tiles.candidates("gdn_step", SHAPES[0], "sm_90")
    assert {tile["BV"] for tile in found} == {32, 64, 128}
    assert any("maxnreg" in tile for tile in found) and any("maxnreg" not in tile for tile in found)
    assert len(found) == len({tuple(sorted(tile.items())) for tile in found})
