"""Tiles of attention_prefill: whole blocks, enough shared memory, and how many keys are copied at a time."""

from __future__ import annotations

import itertools

import pytest

from rocm_serve.ops import tiles
from rocm_serve.ops.tiles_prefill import KEY_UNIT, KEYS_AT_A_TIME, copied_keys, prefill_splits

ARCHS = ("sm_90", "sm_80", "gfx942", "gfx950")
SHAPES = [
    {"rows": rows, "vectors": vectors, "d": d, "bytes": size}
    for rows, vectors, d, size in itertools.product((1, 2, 16, 500, 8192), (1, 4, 8, 64), (16, 64, 256), (2, 4))
]


@pytest.mark.parametrize("arch", ARCHS)
def test_candidates_hold_whole_rows_and_blocks_and_begin_with_the_rule(arch: str) -> None:
    most = {"sm_90": 227, "sm_80": 163, "gfx942": 64, "gfx950": 160}[arch] << 10
    for shape in SHAPES:
        found = tiles.candidates("attention_prefill", shape, arch)
        assert found[0] == tiles.by_rule("attention_prefill", shape, arch)
        assert len(found) > 1 or shape["bytes"] == 4
        for one in found:
            assert one["BLOCK_M"] >= max(16, shape["vectors"]), f"{shape}: {one} cuts the heads of a row"
            assert KEY_UNIT % one["BLOCK_N"] == 0, f"{shape}: {one} reads behind the keys of a sequence"
            assert all(one[name] & one[name] - 1 == 0 for name in ("BLOCK_M", "BLOCK_N", "num_warps"))
            held = 0 if arch.startswith("gfx") else one["BLOCK_M"]
            rows = held + 2 * one["BLOCK_N"] * one["num_stages"]
            assert rows * shape["d"] * shape["bytes"] <= most, f"{shape}: {one} does not fit"
            assert not one["DESCRIBED"] or (arch == "sm_90" and shape["bytes"] == 2)
            assert arch != "sm_90" or shape["bytes"] == 4 or one["BLOCK_M"] == 16 * one["num_warps"], "64 rows a group"


def test_few_rows_take_a_small_tile_and_many_a_large_one() -> None:
    def rows(count: int, arch: str) -> int:
        shape = {"rows": count, "vectors": 8, "d": 256, "bytes": 2}
        return tiles.by_rule("attention_prefill", shape, arch)["BLOCK_M"]

    assert [rows(count, "gfx942") for count in (1, 3, 9, 500)] == [16, 32, 128, 128]
    assert [rows(count, "sm_90") for count in (1, 9, 500)] == [64, 128, 128]


def test_copied_keys_are_those_of_the_sequences_up_to_a_bound_that_one_alone_may_pass() -> None:
    assert copied_keys(100, 3) == 3 * KEY_UNIT
    assert copied_keys(1000, 1000) == KEYS_AT_A_TIME
    assert copied_keys(KEYS_AT_A_TIME + 1, 4) == KEYS_AT_A_TIME + KEY_UNIT


def test_keys_are_split_where_tiles_leave_units_idle_but_not_into_crumbs() -> None:
    assert prefill_splits(256, 30720, "sm_90") == 1, "2048 rows of two key heads fill the card"
    assert prefill_splits(64, 30720, "sm_90") == 2
    assert prefill_splits(8, 30720, "sm_90") == 16
    assert prefill_splits(1, 1 << 20, "gfx942") == 64
    assert prefill_splits(8, 1000, "sm_90") == 1 and prefill_splits(8, 0, "sm_90") == 1
    assert prefill_splits(8, 30720, "interpreter") == 1
