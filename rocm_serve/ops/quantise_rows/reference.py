"""Rows as FP8, for experts on other ranks. Letters: T rows, K width."""

from __future__ import annotations

import torch

from rocm_serve.ops import fp8


def quantise_rows(x_TK: torch.Tensor, *, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise each row per 128 columns.

    Shapes: x_TK -> FP8 values [T, K] of `dtype`, and fp32 multipliers [T, ceil(K / 128)].
    Numerics: the values that the ops quantise to under the activation "fp8_1x128": see ops.fp8.quantise_rows.
    """
    return fp8.quantise_rows(x_TK, dtype)
