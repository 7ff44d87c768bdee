"""Block FP8 (e4m3fn): W = fp8 * scale, one scale per 128 x 128 block. Reference conversions in float32.

Shape suffixes: R rows, C columns, r = ceil(R / block), c = ceil(C / block); leading dimensions (experts) pass through.
"""

from __future__ import annotations

import torch
from torch import Tensor

FP8_MAX = 448.0  # largest finite e4m3fn


def spread(scale_rc: Tensor, rows: int, columns: int, block: tuple[int, int] = (128, 128)) -> Tensor:
    """Repeat each scale over its block.

    Shapes: [..., r, c] -> [..., R, C].
    """
    tall = scale_rc.repeat_interleave(block[0], -2)[..., :rows, :]
    return tall.repeat_interleave(block[1], -1)[..., :columns]


def dequantise(w_RC: Tensor, scale_rc: Tensor, block: tuple[int, int] = (128, 128)) -> Tensor:
    """Return the float32 weight: fp8 value times its block's scale (BF16 scales go to float32 first).

    Shapes: [..., R, C], [..., r, c] -> [..., R, C].
    """
    assert w_RC.dtype is torch.float8_e4m3fn
    return w_RC.float() * spread(scale_rc.float(), w_RC.shape[-2], w_RC.shape[-1], block)


def quantise(w_RC: Tensor, block: tuple[int, int] = (128, 128)) -> tuple[Tensor, Tensor]:
    """Return e4m3fn values and BF16 scales such that no value saturates by more than the scale's rounding.

    Shapes: [..., R, C] -> [..., R, C], [..., r, c].
    """
    rows, columns = w_RC.shape[-2:]
    w_RC = w_RC.float()
    pad = (0, -columns % block[1], 0, -rows % block[0])
    blocks = torch.nn.functional.pad(w_RC.abs(), pad).unflatten(-1, (-1, block[1])).unflatten(-3, (-1, block[0]))
    peak_rc = blocks.amax(dim=(-3, -1))
    scale_rc = torch.where(peak_rc > 0, peak_rc / FP8_MAX, 1.0).bfloat16()
    scaled = w_RC / spread(scale_rc.float(), rows, columns, block)
    return scaled.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scale_rc
