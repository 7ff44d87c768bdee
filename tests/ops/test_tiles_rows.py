"""Tiles of the kernels that pass once over rows."""

from __future__ import annotations

import pytest

from rocm_serve.ops import tiles_rows


@pytest.mark.parametrize(("arch", "lanes"), [("sm_90", 32), ("gfx942", 64), ("gfx950", 64)])
def test_a_lane_of_the_convolution_has_8_or_16_bytes_and_a_program_all_rows_that_a_state_carries(
    arch: str, lanes: int
) -> None:
    for one_row in (True, False):
        tile = tiles_rows.causal_conv_tile(arch, one_row=one_row)
        assert tile["COLUMNS"] == (4 if lanes == 32 and not one_row else 8) * lanes * tile["num_warps"]
        assert tile["ROWS"] == 1 if one_row else tile["ROWS"] >= 16, "of 17 taps 16 rows are carried"


@pytest.mark.parametrize("width", [20, 256, 512, 1024, 1500])
def test_rows_of_keys_fill_a_program_and_are_cut_where_they_do_not_fit(width: int) -> None:
    tile = tiles_rows.kv_write_tile(width)
    assert tile["ROWS"] * tile["BLOCK"] == 1024 and (tile["BLOCK"] >= width or tile["ROWS"] == 1)


def test_few_rows_are_quantised_in_small_programs() -> None:
    few, many = tiles_rows.quantise_rows_tile(64), tiles_rows.quantise_rows_tile(65)
    assert few["BLOCKS"] < many["BLOCKS"] and few["num_warps"] < many["num_warps"]
    few, many = tiles_rows.qk_norm_rope_kv_write_tile(512), tiles_rows.qk_norm_rope_kv_write_tile(513)
    assert few["BLOCK_H"] < many["BLOCK_H"] and few["num_warps"] < many["num_warps"]
