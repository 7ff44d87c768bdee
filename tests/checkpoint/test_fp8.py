"""Block FP8 against float64 arithmetic, block by block."""

from __future__ import annotations

import pytest
import torch

from rocm_serve.checkpoint.fp8 import FP8_MAX, dequantise, quantise


@pytest.mark.parametrize(
    "shape", [(128, 128), (256, 384), (3, 256, 128), (1, 1), (130, 200), (127, 5), (2, 2, 129, 257)]
)
def test_quantising_keeps_every_element_within_half_a_step_of_its_block(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(sum(shape))
    weight = torch.randn(shape, generator=generator) * torch.rand(shape[-1], generator=generator) * 3
    values, scales = quantise(weight)
    assert values.dtype is torch.float8_e4m3fn and scales.dtype is torch.bfloat16
    rows, columns = shape[-2:]
    assert scales.shape == (*shape[:-2], -(-rows // 128), -(-columns // 128))
    got = dequantise(values, scales).double()
    for r in range(0, rows, 128):
        for c in range(0, columns, 128):
            scale = scales[..., r // 128, c // 128].double()
            block = weight[..., r : r + 128, c : c + 128].double()
            peak = block.abs().amax((-1, -2))
            assert torch.allclose(scale, peak / FP8_MAX, rtol=2**-8)
            error = (got[..., r : r + 128, c : c + 128] - block).abs()
            step = block.abs() * 2**-4 + scale[..., None, None] * (2**-10 + 448 * 2**-8)
            assert (error <= step).all()
            bytes_of = values[..., r : r + 128, c : c + 128].double() * scale[..., None, None]
            assert torch.equal(bytes_of.float(), got[..., r : r + 128, c : c + 128].float())


def test_a_block_of_zeros_stays_zero() -> None:
    values, scales = quantise(torch.zeros(128, 256))
    assert (dequantise(values, scales) == 0).all()
    assert (scales == 1).all()


def test_every_fp8_value_survives_a_round_trip() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    finite = codes[~codes.float().isnan()]
    weight = torch.zeros(128, 128)
    weight.view(-1)[: len(finite)] = finite.float()
    values, scales = quantise(weight)
    assert (scales == 1).all()
    assert torch.equal(dequantise(values, scales), weight)
