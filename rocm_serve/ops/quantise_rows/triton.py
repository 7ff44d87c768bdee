"""Rows as FP8, in Triton: the kernel of the products with quantised rows. Letters: T rows, K width."""

from __future__ import annotations

import torch

from rocm_serve.ops.triton_common import triton as common


def quantise_rows(x_TK: torch.Tensor, *, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise each row per 128 columns, bit for bit as the reference.

    Shapes: x_TK -> FP8 values [T, K] of `dtype`, and fp32 multipliers [T, ceil(K / 128)].
    """
    return common.quantise_rows(x_TK, dtype)
