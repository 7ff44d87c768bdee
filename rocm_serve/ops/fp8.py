"""Block FP8: 128 x 128 blocks of a weight and 1 x 128 blocks of a row, each with one fp32 multiplier.

Letters: T rows, K inner dimension, N outer dimension.
"""

from __future__ import annotations

import torch

BLOCK = 128
AMAX_FLOOR = 1e-10  # a row of zeros gets this, so that no scale is zero


def fp8_max(dtype: torch.dtype) -> float:
    """Return the largest magnitude written for a row in `dtype`.

    Units: e4m3fn 448. e4m3fnuz 224, not its own maximum of 240: the value that the released kernels use.
    """
    return {torch.float8_e4m3fn: 448.0, torch.float8_e4m3fnuz: 224.0}[dtype]


def dequantise(w_NK: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the fp32 weight of an FP8 one.

    Shapes: w_NK, scale [ceil(N / 128), ceil(K / 128)] -> [N, K]. The scale multiplies, despite "scale_inv".
    """
    n, k = w_NK.shape
    w = w_NK.float()
    if n % BLOCK == 0 and k % BLOCK == 0:
        blocks = w.view(n // BLOCK, BLOCK, k // BLOCK, BLOCK)
        return blocks.mul_(scale[:, None, :, None]).view(n, k)
    wide = scale.repeat_interleave(BLOCK, 0)[:n].repeat_interleave(BLOCK, 1)[:, :k]
    return w.mul_(wide)


def quantise_rows(x_TK: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise each row per 128 columns.

    Shapes: x_TK -> FP8 values [T, K] and fp32 multipliers [T, ceil(K / 128)].
    """
    top = fp8_max(dtype)
    values, scales = [], []
    for block in x_TK.float().split(BLOCK, dim=1):
        scale = block.abs().amax(1, keepdim=True).clamp_min(AMAX_FLOOR) / top
        values.append((block / scale).clamp(-top, top).to(dtype))
        scales.append(scale)
    return torch.cat(values, 1), torch.cat(scales, 1)


def multiply_1x128(x_TK: torch.Tensor, w_NK: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Multiply quantised rows with an FP8 weight, each 128 columns rescaled before they are summed in fp32.

    Shapes: x_TK (any float), w_NK FP8, scale [ceil(N / 128), ceil(K / 128)] -> fp32 [T, N].
    """
    q_TK, s_TB = quantise_rows(x_TK, w_NK.dtype)
    n = w_NK.shape[0]
    total = torch.zeros(x_TK.shape[0], n, dtype=torch.float32, device=x_TK.device)
    for b, (q, w) in enumerate(zip(q_TK.split(BLOCK, 1), w_NK.split(BLOCK, 1), strict=True)):
        partial = q.float() @ w.float().T
        total += partial * s_TB[:, b, None] * scale[:, b].repeat_interleave(BLOCK)[:n]
    return total
