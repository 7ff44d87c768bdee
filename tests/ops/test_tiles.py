"""Tiles by table and by rule, without torch."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import pytest

from rocm_serve.ops import tiles


@pytest.mark.parametrize(("rows", "bucket"), [(0, 1), (1, 1), (2, 2), (3, 4), (5, 8), (8, 8), (129, 256)])
def test_rows_are_rounded_up_to_a_power_of_two(rows: int, bucket: int) -> None:
    assert tiles.bucketed({"rows": rows, "k": 96}) == {"rows": bucket, "k": 96}


@pytest.fixture(autouse=True)
def _nothing_remembered() -> Iterator[None]:
    tiles.forget()
    yield
    tiles._chosen.cache_clear()


def test_a_tuned_tile_goes_before_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {"one_kernel": {"k=96,rows=8": {"BM": 32}}}
    monkeypatch.setattr(tiles, "tuned_table", lambda arch: table if arch == "sm_90" else {})
    monkeypatch.setitem(tiles.RULES, "one_kernel", lambda shape, arch: {"BM": shape["rows"]})
    assert tiles.tile("one_kernel", {"rows": 5, "k": 96}, "sm_90") == {"BM": 32}
    assert tiles.tile("one_kernel", {"rows": 5, "k": 96}, "gfx942") == {"BM": 8}
    assert tiles.tile("one_kernel", {"rows": 9, "k": 96}, "sm_90") == {"BM": 16}


def test_a_tuned_tile_of_another_version_is_not_taken_and_that_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By names: too few, too many, and those of two candidates together; a candidate's own are taken."""
    table = {
        "one_kernel": {f"rows={n}": tile for n, tile in ((1, {}), (2, {"BM": 9, "OLD": 1}), (4, {"BM": 9, "BN": 9}))}
    }
    table["one_kernel"]["rows=8"] = {"BN": 9}
    monkeypatch.setattr(tiles, "tuned_table", lambda arch: table)
    monkeypatch.setitem(tiles.RULES, "one_kernel", lambda shape, arch: {"BM": 16})
    monkeypatch.setitem(tiles.CANDIDATES, "one_kernel", lambda shape, arch: [{"BN": 64}])
    with caplog.at_level("WARNING", "rocm_serve.ops.tiles"):
        chosen = [tiles.tile("one_kernel", {"rows": rows}, "sm_90") for rows in (1, 2, 4, 8)]
    assert chosen == [{"BM": 16}] * 3 + [{"BN": 9}]
    assert len(caplog.records) == 1 and "one_kernel" in caplog.text


def test_a_kernel_without_a_rule_is_an_error() -> None:
    with pytest.raises(KeyError):
        tiles.tile("no_such_kernel", {"rows": 1}, "sm_90")


def test_the_rule_is_the_first_candidate_and_none_comes_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tiles.RULES, "one_kernel", lambda shape, arch: {"BM": shape["rows"]})
    assert tiles.candidates("one_kernel", {"rows": 5}, "sm_90") == [{"BM": 8}]
    monkeypatch.setitem(tiles.CANDIDATES, "one_kernel", lambda shape, arch: [{"BM": 4}, {"BM": 8}, {"BM": 4}])
    assert tiles.candidates("one_kernel", {"rows": 5}, "sm_90") == [{"BM": 8}, {"BM": 4}]


def test_a_users_table_goes_before_the_committed_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(tiles.RULES, "one_kernel", lambda shape, arch: {"BM": 8})
    file = tmp_path / "rocm_serve" / "tuned" / "gfx_none.json"
    assert tiles.user_table("gfx_none") == file
    tiles.forget()
    try:
        assert tiles.tuned_table("gfx_none") == {}
        tiles.forget()
        file.parent.mkdir(parents=True)
        file.write_text('{"one_kernel": {"rows=8": {"BM": 32}}}')
        assert tiles.tile("one_kernel", {"rows": 7}, "gfx_none") == {"BM": 32}
    finally:
        tiles.forget()


def test_a_tile_is_forced_in_a_block_only_and_what_is_asked_for_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tiles.RULES, "one_kernel", lambda shape, arch: {"BM": shape["rows"]})
    with tiles.watched() as seen, tiles.forced("one_kernel", {"BM": 64}):
        with tiles.forced("one_kernel", {"BM": 128}):
            assert tiles.tile("one_kernel", {"rows": 5}, "sm_90") == {"BM": 128}
        assert tiles.tile("one_kernel", {"rows": 5}, "sm_90") == {"BM": 64}
    assert tiles.tile("one_kernel", {"rows": 5}, "sm_90") == {"BM": 8}
    assert seen == [("one_kernel", {"rows": 8})] * 2


def test_every_committed_table_names_kernels_and_keys_that_rules_know() -> None:
    folder = resources.files("rocm_serve.ops") / "tuned"
    for file in folder.iterdir() if folder.is_dir() else ():
        if file.name.endswith(".json"):
            for kernel, shapes in tiles.tuned_table(file.name.removesuffix(".json")).items():
                for key, tile in shapes.items():
                    shape = {name: int(size) for name, _, size in (part.partition("=") for part in key.split(","))}
                    assert tiles.shape_key(shape) == key, f"{file.name} {kernel}: {key} is not as keys are written"
                    taken = tiles.tile(kernel, shape, file.name.removesuffix(".json"))
                    assert taken == tile, f"{file.name} {kernel} {key}: passed over for the rule"


@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
@pytest.mark.parametrize("kernel", ["add_norm_linear", "shared_down_add"])
def test_rows_of_a_weight_that_wait_for_what_is_made_fit_the_registers(kernel: str, arch: str) -> None:
    lanes = 64 if arch == "gfx942" else 32
    for rows, n, k in ((1, 12352, 2048), (4, 4640, 8192), (1, 2048, 512), (3, 8192, 256), (1, 40, 64)):
        for one in tiles.candidates(kernel, {"rows": rows, "n": n, "k": k, "bytes": 2}, arch):
            if "BM" not in one:  # these hold whole rows
                assert one["BN"] * k <= 128 * lanes * one["num_warps"] and one["num_warps"] * lanes <= 1024
    for rows in (5, 16, 33, 64):
        found = tiles.candidates("shared_down_add", {"rows": rows, "n": 2048, "k": 512, "bytes": 2}, arch)
        assert all(one["BM"] * one["BK"] <= 64 * lanes * one["num_warps"] for one in found) and len(found) > 2
