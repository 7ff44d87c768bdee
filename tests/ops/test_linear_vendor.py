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


@pytest.mark.parametrize("arch", ["sm_90", "gfx950"])
def test_it_goes_before_triton_and_either_can_be_asked_for(arch: str) -> None:
    def bound(**overrides: str) -> str:
        return next(line.provider for line in choose(overrides, arch) if line.op == "linear")

    assert bound() == "torch"
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
@pytest.mark.parametrize("rows", [1, 16, 32, 64, 128, 4096])
def test_tiles_fit_a_unit_and_few_rows_are_spread_over_it(arch: str, rows: int) -> None:
    shape = {"rows": rows, "n": 12288, "k": 2048, "bytes": 2}
    rule = linear_tile(shape, arch)
    for one in (rule, *linear_tiles(shape, arch)):
        assert min(rows, 128) <= one["BM"] and all(size & (size - 1) == 0 for key, size in one.items() if key[0] == "B")
        assert 2 * (one["BM"] + one["BN"]) * one["BK"] * one["num_stages"] <= 200 << 10
    assert rows > 32 or shape["n"] // rule["BN"] >= 256
    assert linear_tile({**shape, "bytes": 4}, arch)["num_stages"] == 1
