"""Tiles by table and by rule, without torch."""

from __future__ import annotations

import pytest

from rocm_serve.ops import tiles


@pytest.mark.parametrize(("rows", "bucket"), [(0, 1), (1, 1), (2, 2), (3, 4), (5, 8), (8, 8), (129, 256)])
def test_rows_are_rounded_up_to_a_power_of_two(rows: int, bucket: int) -> None:
    assert tiles.bucketed({"rows": rows, "k": 96}) == {"rows": bucket, "k": 96}


def test_a_tuned_tile_goes_before_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {"one_kernel": {"k=96,rows=8": {"BM": 32}}}
    monkeypatch.setattr(tiles, "tuned_table", lambda arch: table if arch == "sm_90" else {})
    monkeypatch.setitem(tiles.RULES, "one_kernel", lambda shape, arch: {"BM": shape["rows"]})
    assert tiles.tile("one_kernel", {"rows": 5, "k": 96}, "sm_90") == {"BM": 32}
    assert tiles.tile("one_kernel", {"rows": 5, "k": 96}, "gfx942") == {"BM": 8}
    assert tiles.tile("one_kernel", {"rows": 9, "k": 96}, "sm_90") == {"BM": 16}


def test_a_kernel_without_a_rule_is_an_error() -> None:
    with pytest.raises(KeyError):
        tiles.tile("no_such_kernel", {"rows": 1}, "sm_90")
