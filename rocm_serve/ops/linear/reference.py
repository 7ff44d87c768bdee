"""The plain matrix product. Letters: T rows, K inner, N outer."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from rocm_serve.ops.rows import pad_rows


def linear(x_TK: torch.Tensor, weight_NK: torch.Tensor, *, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """Multiply rows with a weight: x @ weight.T.

    Shapes: x [T, K], weight [N, K] -> [T, N], dtype of x or `out_dtype`.
    Numerics: fp32 products and sums, one rounding. The weight is widened first: bf16 products of CPU libraries are
    several times slower and round in the middle.
    """
    rows = x_TK.shape[0]
    y_TN = F.linear(pad_rows(x_TK.float()), weight_NK.float())[:rows]
    return y_TN.to(out_dtype or x_TK.dtype)
