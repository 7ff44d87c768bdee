"""Number formats against torch's own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from evals.gfx.emulator.formats import Fp8, fma32, fp8_values, from_bf16, signed, to_bf16, to_f16_towards_zero, to_fp8

DTYPES: dict[tuple[Fp8, bool], torch.dtype] = {
    ("fp8", False): torch.float8_e4m3fn,
    ("fp8", True): torch.float8_e4m3fnuz,
    ("bf8", False): torch.float8_e5m2,
    ("bf8", True): torch.float8_e5m2fnuz,
}


def random_floats(count: int = 20000) -> np.ndarray:
    seed = np.random.SeedSequence()
    print(f"seed {seed.entropy}")
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(count) * np.exp2(rng.integers(-24, 12, count))).astype(np.float32)


@pytest.mark.parametrize(("kind", "fnuz"), DTYPES)
def test_the_value_of_every_code_is_torchs(kind: Fp8, fnuz: bool) -> None:
    expected = torch.arange(256, dtype=torch.uint8).view(DTYPES[kind, fnuz]).float().numpy()
    np.testing.assert_array_equal(fp8_values(kind, fnuz), expected)


@pytest.mark.parametrize(("kind", "fnuz"), DTYPES)
def test_rounding_to_fp8_is_torchs_within_the_range_and_saturates_beyond(kind: Fp8, fnuz: bool) -> None:
    values = fp8_values(kind, fnuz)
    largest = np.nanmax(np.where(np.isfinite(values), values, -1))
    ties = (values[:126].astype(np.float64) + values[1:127]) / 2
    x = np.concatenate([random_floats().clip(-largest, largest), ties, -ties]).astype(np.float32)
    x = x[np.isfinite(x) & (np.abs(x) <= largest)]
    expected = torch.from_numpy(x).to(DTYPES[kind, fnuz]).view(torch.uint8).numpy()
    np.testing.assert_array_equal(to_fp8(x, kind, fnuz), expected)
    beyond = np.array([largest * 2, -largest * 2, np.nan], np.float32)
    back = values[to_fp8(beyond, kind, fnuz)]
    assert back[0] == largest and back[1] == -largest and np.isnan(back[2])


def test_bf16_rounds_as_torch_and_comes_back() -> None:
    x = np.concatenate([random_floats(), np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, 3.4e38], np.float32)])
    expected = torch.from_numpy(x).to(torch.bfloat16)
    got = from_bf16(to_bf16(x))
    np.testing.assert_array_equal(got, expected.float().numpy())


def test_fp16_towards_zero_is_never_larger() -> None:
    x = random_floats()
    half = to_f16_towards_zero(x).astype(np.uint16).view(np.float16).astype(np.float32)
    finite = np.abs(x) < 65000
    assert (np.abs(half[finite]) <= np.abs(x[finite])).all()
    assert (np.abs(x[finite] - half[finite]) <= np.maximum(np.abs(x[finite]) * 2.0**-10, 2.0**-24)).all()


def test_a_fused_product_keeps_what_a_rounded_one_loses() -> None:
    a = np.array([1 + 2.0**-12], np.float32)
    assert fma32(a, a, -(a * a))[0] == np.float32(2.0**-24)


def test_signed_reads_twos_complement() -> None:
    assert [signed(v, 8) for v in (0, 127, 128, 255)] == [0, 127, -128, -1]
