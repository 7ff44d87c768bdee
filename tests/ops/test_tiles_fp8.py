"""Tiles of the product with a block-FP8 weight: by rule, and what is tried for FP8 rows fits."""

from __future__ import annotations

from itertools import product

import pytest

from rocm_serve.ops import tiles
from tests.ops.test_tiles_moe import SHARED_MEMORY

ROWS = (1, 16, 17, 32, 33, 64, 65, 300, 2048, 16384)
OUT_BYTES = 2  # a result waits in shared memory for its store


def shape(rows: int, *, bits: int = 8, fp8: int = 1, n: int = 4096, k: int = 2048) -> dict[str, int]:
    return {"rows": rows, "n": n, "k": k, "bits": bits, "fp8": fp8}


def test_the_form_for_all_rows_goes_by_rows() -> None:
    found = {rows: tiles.by_rule("fp8_linear", shape(rows, bits=16, fp8=0), "sm_90") for rows in ROWS}
    assert [tile["BM"] for tile in found.values()] == [16, 16, 32, 32, 64, 64, 128, 128, 128, 128]
    assert {tile["MANY"] for tile in found.values()} == {0}
    wide = {"MANY": 0, "BM": 128, "BN": 128, "BK": 64, "num_warps": 8, "num_stages": 3}
    assert found[300] == wide and found[1] == wide | {"BM": 16, "num_warps": 4}
    for other in (shape(300, bits=16, n=130), shape(300, bits=16, k=200)):
        assert tiles.by_rule("fp8_linear", other, "sm_90") == wide, "not of whole blocks"
    gfx = tiles.by_rule("fp8_linear", shape(300), "gfx942")
    assert gfx == wide | {"BK": 128, "num_stages": 2}
    exact = {"MANY": 0, "BM": 16, "BN": 128, "BK": 32, "num_warps": 4, "num_stages": 1}
    assert {tuple(tiles.by_rule("fp8_linear", shape(rows, bits=32), "sm_90").items()) for rows in ROWS} == {
        tuple(exact.items())
    }


@pytest.mark.parametrize(
    ("n", "rows", "columns"),
    [(12288, 64, 128), (12288, 1, 128), (8192, 1, 64), (4608, 1, 64), (128, 1, 64)]
    + [(2048, 64, 64), (2048, 256, 64), (2048, 512, 128), (2048, 8192, 128)],
)
def test_fp8_rows_get_the_wide_tile_where_it_keeps_sm_90_busy(n: int, rows: int, columns: int) -> None:
    tile = tiles.by_rule("fp8_linear", shape(rows, bits=16, n=n), "sm_90")
    assert tile["MANY"] and tile["DESC"] and (tile["BM"], tile["BN"], tile["BK"]) == (64, columns, 128)


@pytest.mark.parametrize(
    "other",
    [shape(2048, bits=32), shape(2048, fp8=0), shape(2048, n=130), shape(2048, k=200)],
    ids=["float32", "bf16 rows", "ragged n", "ragged k"],
)
@pytest.mark.parametrize("arch", SHARED_MEMORY)
def test_where_there_is_nothing_to_try_the_rule_stays(other: dict[str, int], arch: str) -> None:
    assert len(tiles.candidates("fp8_linear", other, arch)) == 1


def test_few_rows_are_tuned_where_a_copy_engine_reads() -> None:
    assert len(tiles.candidates("fp8_linear", shape(32), "gfx942")) == 1
    tried = tiles.candidates("fp8_linear", shape(32, bits=16), "sm_90")
    assert {tile["MANY"] for tile in tried} == {1}, "a row has the bits that it has among many"
    assert {tile["BN"] for tile in tried} == {64, 128}


@pytest.mark.parametrize(("rows", "arch"), [(1, "sm_90"), *product((64, 300, 8192), SHARED_MEMORY)])
def test_what_is_tried_fits(rows: int, arch: str) -> None:
    every = tiles.candidates("fp8_linear", shape(rows, bits=16 if arch == "sm_90" else 8), arch)
    tried = [tile for tile in every if tile["MANY"]]
    assert len(tried) >= 2 and len(every) == len(tried) + (arch != "sm_90")
    for tile in tried:
        assert tile["BK"] == 128 and 128 % tile["BN"] == 0, "no part lies in two blocks of scales"
        assert tile["PARTS"] in (1, 2, 4) and tile["PARTS"] * tile["BN"] <= 256
        assert bool(tile["DESC"]) == (arch == "sm_90")
        factors = (tile["BM"] + tile["PARTS"] * tile["BN"]) * tile["BK"]
        stages = tile["num_stages"] - (arch == "gfx942")  # one of two is kept in registers
        waiting = tile["BM"] * tile["BN"] * OUT_BYTES if tile["PROGRAMS"] else 0
        assert stages * factors + waiting <= SHARED_MEMORY[arch], tile
