"""The plain matrix product by the library that torch calls: cuBLAS or hipBLASLt. Letters: T rows, K inner, N outer."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from rocm_serve.ops.linear.reference import linear as linear_reference
from rocm_serve.platform.probe import gpus_seen_by_torch

# The library may else add the parts of a long row up in bf16, as soon as it cuts it.
torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False

_WIDENED_ROWS = 8192  # of a weight, in fp32 at a time
_WIDENS = gpus_seen_by_torch().kind == "cuda"  # ROCm's torch refuses a float32 result of bf16 factors


def linear(x_TK: torch.Tensor, weight_NK: torch.Tensor, *, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """Multiply rows with a weight; see the reference. Numerics: float32 sums, one rounding.

    A result that is wider than both factors (the logits) has one call on CUDA and none on ROCm, where the weight is
    widened a piece after the other.
    """
    wanted = out_dtype or x_TK.dtype
    if x_TK.dtype == weight_NK.dtype == wanted:
        return F.linear(x_TK, weight_NK)
    halves = x_TK.dtype == weight_NK.dtype == torch.bfloat16
    if _WIDENS and halves and wanted == torch.float32:
        return torch.mm(x_TK, weight_NK.t(), out_dtype=wanted)
    pieces = [linear_reference(x_TK, piece, out_dtype=wanted) for piece in weight_NK.split(_WIDENED_ROWS)]
    return torch.cat(pieces, dim=1)
