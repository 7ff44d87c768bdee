"""Each check of a compiled kernel sees its fault, and an exception with a reason lets it be."""

from __future__ import annotations

from dataclasses import replace

import pytest

from evals.gfx.checks import findings, unknown_exceptions
from evals.gfx.device import Resources

GOOD = Resources(
    vgprs=64, agprs=0, sgprs=20, lds=0, scratch=0, spills=0, loads={16: 4}, stores={4: 1, 16: 2}, matrix=()
)
FAULTS = {
    "spills": (replace(GOOD, spills=3), "3 registers spill"),
    "scratch": (replace(GOOD, scratch=16), "16 bytes of scratch a lane"),
    "wide_loads": (replace(GOOD, loads={4: 9}), "no 16-byte load among"),
    "wide_stores": (replace(GOOD, stores={2: 1, 8: 2}), "no 16-byte store among"),
}


def test_a_good_kernel_has_no_findings() -> None:
    assert findings("k", GOOD, {}, native_fp8=False) == []
    assert findings("k", replace(GOOD, loads={}, stores={}), {}, native_fp8=False) == []


@pytest.mark.parametrize("check", FAULTS)
def test_each_fault_is_found_unless_it_is_excepted(check: str) -> None:
    needs, words = FAULTS[check]
    (found,) = findings("k", needs, {}, native_fp8=False)
    assert found.startswith(f"k: {check}: ") and words in found
    reason = "a reason that a person can read"
    assert findings("k", needs, {check: reason}, native_fp8=False) == []
    assert findings("k", needs, {f"k:{check}": reason}, native_fp8=False) == []
    assert len(findings("k", needs, {f"other:{check}": reason}, native_fp8=False)) == 1


@pytest.mark.parametrize(
    ("matrix", "words"),
    [
        ((), "no matrix instruction"),
        (("v_mfma_f32_32x32x8_f16",), "not FP8: v_mfma_f32_32x32x8_f16"),
        (("v_mfma_f32_32x32x16_fp8_fp8", "v_mfma_f32_16x16x16_bf16"), "not FP8: v_mfma_f32_16x16x16_bf16"),
    ],
)
def test_software_products_are_found_where_fp8_is_meant(matrix: tuple[str, ...], words: str) -> None:
    (found,) = findings("k", replace(GOOD, matrix=matrix), {}, native_fp8=True)
    assert words in found


@pytest.mark.parametrize("name", ["v_mfma_f32_32x32x16_fp8_fp8", "v_mfma_f32_16x16x128_f8f6f4"])
def test_fp8_products_are_what_they_should_be(name: str) -> None:
    assert findings("k", replace(GOOD, matrix=(name,)), {}, native_fp8=True) == []


@pytest.mark.parametrize("exceptions", [{"narrow": "a long reason"}, {"other:spills": "a long reason"}, {"spills": ""}])
def test_exceptions_that_mean_nothing_are_found(exceptions: dict[str, str]) -> None:
    assert len(unknown_exceptions(exceptions, ("k",))) == 1
    assert unknown_exceptions({"spills": "a long reason", "k:scratch": "another reason"}, ("k",)) == []
