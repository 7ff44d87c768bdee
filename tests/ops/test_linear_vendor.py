"""The plain product by torch's library: bound first where there is a GPU, right on all cases, sums in float32."""

from __future__ import annotations

import secrets

import pytest
import torch

from rocm_serve.ops import linear
from rocm_serve.ops.bind import choose
from rocm_serve.ops.linear import vendor
from rocm_serve.ops.linear.cases import CASES
from rocm_serve.ops.tiles_linear import linear_tile, linear_tiles


@pytest.mark.parametrize(("arch", "first"), [("sm_90", "triton"), ("gfx950", "torch")])
def test_triton_goes_first_where_its_tiles_name_the_library_and_either_can_be_asked_for(arch: str, first: str) -> None:
    def bound(**overrides: str) -> str:
        return next(line.provider for line in choose(overrides, arch) if line.op == "linear")

    assert bound() == first
    assert bound(linear="torch") == "torch"
    assert "torch" not in {line.provider for line in choose({}, "cpu")}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_every_case_is_near_the_reference_also_where_the_weight_is_widened(
    case: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vendor, "_WIDENED_ROWS", 50)
    seed = secrets.randbits(31)
    made = CASES[case](torch.Generator().manual_seed(seed), dtype)
    got, expected = vendor.linear(**made), linear.OP.reference(**made)
    assert got.dtype == expected.dtype and got.shape == expected.shape
    size = float(expected.double().norm())
    assert float((got.double() - expected.double()).norm()) <= 5e-3 * size, f"seed {seed}"


def test_the_library_is_kept_from_adding_parts_up_in_bf16() -> None:
    assert torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction in (False, (False, False), (False, True))


@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
@pytest.mark.parametrize("rows", [1, 2, 16, 32, 64, 128, 4096])
@pytest.mark.parametrize(("n", "k"), [(12352, 2048), (2048, 4096), (1280, 2048), (2048, 512), (8192, 256), (7, 101)])
def test_tiles_fit_a_unit_and_few_rows_are_spread_over_it(arch: str, rows: int, n: int, k: int) -> None:
    shape = {"rows": rows, "n": n, "k": k, "bytes": 2}
    rule = linear_tile(shape, arch)
    for one in (rule, *linear_tiles(shape, arch)):
        if one == {"VENDOR": 1}:
            assert arch == "sm_90"
            continue
        assert all(size & (size - 1) == 0 for key, size in one.items() if key not in ("num_stages", "SPLITS"))
        if one["BM"]:
            assert min(rows, 128) <= one["BM"]
            assert 2 * (one["BM"] + one["BN"]) * one["BK"] * one["num_stages"] <= 200 << 10
            assert one.get("SPLITS", 1) == 1 or one["SPLITS"] * one["BK"] <= k
            ahead = one.get("AHEAD", 0)
            assert ahead == 0 or (ahead >= 64 and one["SPLITS"] * ahead <= k and arch == "sm_90"), "columns that exist"
        else:
            assert rows <= 2 or one is rule
    few = "FEW" in rule
    assert few == (arch == "sm_90" and rows <= 16)
    if few and n > 1000:
        assert -(-n // rule["BN"]) * rule["SPLITS"] >= 132 or rule["SPLITS"] * 512 >= k, "an H200's units"
    assert linear_tile({**shape, "bytes": 4}, arch)["num_stages"] == 1
