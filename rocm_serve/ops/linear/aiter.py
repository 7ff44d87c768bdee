"""The plain matrix product by AITER, which chooses a kernel by shape. Letters: T rows, K inner, N outer."""

from __future__ import annotations

import torch
from aiter.tuned_gemm import gemm_a16w16

from rocm_serve.ops.linear.reference import linear as linear_reference

_WIDENED_ROWS = 8192  # of a weight, in fp32 at a time


def linear(x_TK: torch.Tensor, weight_NK: torch.Tensor, *, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """Multiply rows with a weight; see the reference.

    AITER rounds to the rows' dtype before it widens to another `out_dtype`. The op rounds once, so logits asked for in
    fp32 are the reference's, a piece of the weight after the other.
    """
    if out_dtype not in (None, x_TK.dtype):
        pieces = [linear_reference(x_TK, piece, out_dtype=out_dtype) for piece in weight_NK.split(_WIDENED_ROWS)]
        return torch.cat(pieces, dim=1)
    if not x_TK.shape[0]:
        return x_TK.new_empty(0, weight_NK.shape[0])
    return gemm_a16w16(A=x_TK.contiguous(), B=weight_NK, otype=x_TK.dtype)
