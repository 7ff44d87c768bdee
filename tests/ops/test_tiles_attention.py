"""Tiles of attention: enough programs, and candidates that a kernel can be compiled for."""

from __future__ import annotations

import itertools
from importlib import resources

import pytest

from rocm_serve.ops import tiles

ARCHS = ("sm_90", "gfx942", "gfx950")
SHAPES = [
    {"rows": rows, "vectors": vectors, "groups": groups, "d": d, "bytes": size}
    for rows, vectors, groups, d, size in itertools.product(
        (1, 3, 16, 64, 256), (8, 16, 32), (1, 2, 8), (64, 256), (1, 2, 4)
    )
]


@pytest.mark.parametrize("arch", ARCHS)
def test_keys_are_split_until_there_are_enough_programs_and_no_further(arch: str) -> None:
    for shape in SHAPES:
        splits = tiles.by_rule("attention_decode", shape, arch)["SPLITS"]
        sequences = tiles.bucketed(shape)["rows"] * shape["groups"]
        programs = 128 if arch == "sm_90" and shape["vectors"] == 8 else 256
        assert splits == 1 or splits * sequences <= programs
        assert shape["bytes"] == 4 or 2 * splits * sequences > programs, f"{shape}: units are left without work"


@pytest.mark.parametrize("arch", ARCHS)
def test_candidates_fit_into_shared_memory_and_begin_with_the_rule(arch: str) -> None:
    most = {"sm_90": 227, "gfx942": 64, "gfx950": 160}[arch] << 10
    for shape in SHAPES:
        found = tiles.candidates("attention_decode", shape, arch)
        assert found[0] == tiles.by_rule("attention_decode", shape, arch)
        assert len({tuple(one.items()) for one in found}) == len(found)
        assert len(found) > 1 or shape["bytes"] == 4
        for one in found:
            under_way = 1 if arch != "sm_90" or one["num_stages"] == 1 else one["num_stages"] // 2
            block = 2 * one["BLOCK_N"] * shape["d"] * shape["bytes"]
            assert block * under_way <= most and one["BLOCK_N"] >= 16, f"{shape}: {one}"
            assert one["KEY"] == 1 or one["BLOCK_N"] >= 64, f"{shape}: {one} has fewer keys than an instruction's rows"


def test_a_batch_runs_the_tile_of_the_batch_that_it_is_padded_to() -> None:
    shape = {"rows": 5, "vectors": 8, "groups": 1, "d": 256, "bytes": 2}
    assert tiles.tile("attention_decode", shape, "sm_90") == tiles.tile(
        "attention_decode", shape | {"rows": 8}, "sm_90"
    )


def test_the_rule_of_sm_90_finds_most_of_what_was_tuned_there() -> None:
    """Most winners had blocks of 32 KiB and as many programs as units; warps and stages may be others."""
    table = tiles.read_table(resources.files("rocm_serve.ops") / "tuned" / "sm_90.json")["attention_decode"]
    same = []
    for key, winner in table.items():
        shape = {name: int(size) for name, size in (pair.split("=") for pair in key.split(","))}
        rule = tiles.by_rule("attention_decode", shape, "sm_90")
        same.append(all(rule[name] == winner[name] for name in ("SPLITS", "BLOCK_N", "KEY")))
    assert len(same) >= 12 and sum(same) >= len(same) - 2
