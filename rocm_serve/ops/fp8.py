"""Block FP8: 128 x 128 blocks of a weight and 1 x 128 blocks of a row, each with one fp32 multiplier.

Two dialects of e4m3: OCP's "fn" (checkpoints, gfx950, NVIDIA) and "fnuz" (gfx942). The same code means half as much in
fnuz, so a tensor changes its dialect by keeping its codes and doubling its scales; nothing is rounded.

Letters: T rows, K inner dimension, N outer dimension.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
FP8_DTYPES: Mapping[str, torch.dtype] = MappingProxyType({"fn": FN, "fnuz": FNUZ, "none": FN})  # by dialect
FNUZ_SCALE = 2.0  # value of a code in fn / its value in fnuz
_MINUS_ZERO = 0x80  # in fn; in fnuz this code is NaN
_MAGNITUDE = 0x7F  # in fn all ones here are NaN, with either sign; in fnuz they are 240
_SIGN_AND_MAGNITUDE = 0x87F00000 - (1 << 32)  # where a sign-extended code's bits are after a shift by 20

BLOCK = 128
AMAX_FLOOR = 1e-10  # a row of zeros gets this, so that no scale is zero


def fp8_max(dtype: torch.dtype) -> float:
    """Return the largest magnitude written for a row in `dtype`.

    Units: e4m3fn 448. e4m3fnuz 224, not its own maximum of 240: the value that the released kernels use.
    """
    return {FN: 448.0, FNUZ: 224.0}[dtype]


def fn_to_fnuz_(codes: torch.Tensor) -> None:
    """Rewrite e4m3fn codes (uint8, any shape), in place, to e4m3fnuz codes of half their value.

    Minus zero becomes zero. NaN stays NaN: a damaged weight must not become the number 240 on one GPU only.
    """
    assert codes.dtype is torch.uint8
    no_number = (codes & _MAGNITUDE) == _MAGNITUDE
    codes.masked_fill_(codes == _MINUS_ZERO, 0).masked_fill_(no_number, _MINUS_ZERO)


def fn_to_fnuz(w: torch.Tensor) -> torch.Tensor:
    """Return an e4m3fnuz copy of an e4m3fn tensor, half its value: its scales are to be multiplied by FNUZ_SCALE."""
    codes = w.view(torch.uint8).clone()
    fn_to_fnuz_(codes)
    return codes.view(FNUZ)


def kv_scale(dtype: torch.dtype) -> float:
    """Return the multiplier of keys and values in pages of `dtype`.

    2 in fnuz pages: they hold the codes that fn pages would, up to the same 448. Checkpoints of this family bring no
    scales of their own for the cache.
    """
    return FNUZ_SCALE if dtype is FNUZ else 1.0


def widened(x: torch.Tensor) -> torch.Tensor:
    """Return an fp32 copy, exact for all 256 codes of FP8 tensors.

    On the CPU torch converts FP8 value by value. There e4m3fn is widened by shifting its bits into place: with the
    same exponent bits fp32 means 2^-120 as much, subnormal numbers too; one multiplication makes up for that. Eight
    times faster, measured on torch 2.13 with AVX2.
    """
    if x.dtype is not FN or x.device.type != "cpu" or not x.numel():
        return x.float()
    signed = x.view(torch.int8)
    if signed.amax() == _MAGNITUDE or x.view(torch.uint8).amax() == 0xFF:
        return x.float()  # NaN has no place among the shifted numbers
    bits = signed.to(torch.int32).bitwise_left_shift_(20).bitwise_and_(_SIGN_AND_MAGNITUDE)
    return bits.view(torch.float32).mul_(2.0**120)


def dequantise(w_NK: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the fp32 weight of an FP8 one.

    Shapes: w_NK, scale [ceil(N / 128), ceil(K / 128)] -> [N, K]. The scale multiplies, despite "scale_inv".
    """
    n, k = w_NK.shape
    w = widened(w_NK)
    if n % BLOCK == 0 and k % BLOCK == 0:
        blocks = w.view(n // BLOCK, BLOCK, k // BLOCK, BLOCK)
        return blocks.mul_(scale[:, None, :, None]).view(n, k)
    wide = scale.repeat_interleave(BLOCK, 0)[:n].repeat_interleave(BLOCK, 1)[:, :k]
    return w.mul_(wide)


def quantise_rows(
    x_TK: torch.Tensor, dtype: torch.dtype, *, top: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise each row per 128 columns, its largest magnitude to `top` (by default that of `fp8_max`).

    Shapes: x_TK -> FP8 values [T, K] and fp32 multipliers [T, ceil(K / 128)].
    Numerics: a GPU divides by a Python number as torch multiplies with its reciprocal, which moves nearly half of the
    multipliers by their last bit. So the divisor is a tensor. Rows in bf16 lie midway between two codes often enough
    (1 in 900) for that bit to show: 3.5e-3 in a product, 2e-2 after the second quantisation inside the experts.
    """
    top = fp8_max(dtype) if top is None else top
    tops = torch.full((1, 1), top, dtype=torch.float32, device=x_TK.device)
    values, scales = [], []
    for block in x_TK.float().split(BLOCK, dim=1):
        scale = block.abs().amax(1, keepdim=True).clamp_min(AMAX_FLOOR) / tops
        values.append((block / scale).clamp(-top, top).to(dtype))
        scales.append(scale)
    return torch.cat(values, 1), torch.cat(scales, 1)


def multiply_1x128(
    x_TK: torch.Tensor, w_NK: torch.Tensor, scale: torch.Tensor, *, top: float | None = None
) -> torch.Tensor:
    """Multiply quantised rows with an FP8 weight, each 128 columns rescaled before they are summed in fp32.

    Shapes: x_TK (any float), w_NK FP8, scale [ceil(N / 128), ceil(K / 128)] -> fp32 [T, N]. `top`: as quantise_rows.
    """
    return multiply_quantised(*quantise_rows(x_TK, w_NK.dtype, top=top), w_NK, scale)


def multiply_quantised(q_TK: torch.Tensor, s_TB: torch.Tensor, w_NK: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Multiply what `quantise_rows` returned with an FP8 weight; see multiply_1x128.

    Shapes: q_TK (FP8 values, in any dtype that holds them), s_TB fp32 [T, ceil(K / 128)] -> fp32 [T, N].
    """
    n = w_NK.shape[0]
    total = torch.zeros(q_TK.shape[0], n, dtype=torch.float32, device=q_TK.device)
    for b, (q, w) in enumerate(zip(q_TK.split(BLOCK, 1), w_NK.split(BLOCK, 1), strict=True)):
        partial = widened(q) @ widened(w).T
        total += partial * s_TB[:, b, None] * scale[:, b].repeat_interleave(BLOCK)[:n]
    return total
