"""The matrix product with a block-FP8 weight. Letters: T rows, K inner, N outer."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from rocm_serve.ops.fp8 import dequantise, multiply_1x128
from rocm_serve.ops.rows import pad_rows


def fp8_linear(x_TK: torch.Tensor, weight_NK: torch.Tensor, scale: torch.Tensor, *, activation: str) -> torch.Tensor:
    """Multiply rows with an FP8 weight: x @ (weight * scale).T.

    Shapes: x [T, K], weight FP8 [N, K], scale fp32 [ceil(N / 128), ceil(K / 128)] -> [T, N], dtype of x.
    Errors: ValueError for an activation other than "bf16" and "fp8_1x128".
    Numerics: "bf16" takes the rows as they are (bf16 or float32) and the weight dequantised, fp32 inside.
    "fp8_1x128" quantises each row per 128 columns and rescales every 128 columns before summing in fp32.
    """
    rows = x_TK.shape[0]
    x = pad_rows(x_TK.float())
    if activation == "bf16":
        y_TN = F.linear(x, dequantise(weight_NK, scale))
    elif activation == "fp8_1x128":
        y_TN = multiply_1x128(x, weight_NK, scale)
    else:
        raise ValueError(f"fp8_linear knows the activations bf16 and fp8_1x128, not {activation!r}")
    return y_TN[:rows].to(x_TK.dtype)
