"""Block FP8: what a row or a weight becomes."""

from __future__ import annotations

import pytest
import torch

from rocm_serve.ops.fp8 import dequantise, fp8_max, quantise_rows

FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz


@pytest.mark.parametrize(("dtype", "top"), [(FN, 448.0), (FNUZ, 224.0)])
def test_the_largest_value_of_a_block_becomes_the_largest_code(dtype: torch.dtype, top: float) -> None:
    x = torch.randn(9, 300, generator=torch.Generator().manual_seed(0)) * 50
    values, scales = quantise_rows(x, dtype)
    assert values.shape == (9, 300) and scales.shape == (9, 3)
    for at, block in enumerate(values.float().split(128, dim=1)):
        assert torch.equal(block.abs().amax(1), torch.full((9,), top))
        back = block * scales[:, at, None]
        assert (back - x[:, at * 128 : at * 128 + 128]).abs().max() <= x.abs().max() * 2**-4
    assert fp8_max(dtype) == top


def test_a_row_of_zeros_stays_zero_and_has_a_scale() -> None:
    values, scales = quantise_rows(torch.zeros(2, 256), FN)
    assert values.float().abs().max() == 0
    assert (scales > 0).all()


@pytest.mark.parametrize("shape", [(256, 384), (130, 200), (1, 1)])
def test_every_weight_is_multiplied_by_the_scale_of_its_block(shape: tuple[int, int]) -> None:
    n, k = shape
    g = torch.Generator().manual_seed(1)
    w = torch.randn(n, k, generator=g).to(FN)
    scale = torch.rand(-(-n // 128), -(-k // 128), generator=g)
    wide = dequantise(w, scale)
    for i, j in ((0, 0), (n - 1, k - 1), (n // 2, k // 3)):
        assert wide[i, j] == w[i, j].float() * scale[i // 128, j // 128]
