"""The product as AITER means it: rows quantised to the largest number of the weight's dtype.

That is 240 in fnuz, where the reference stops at 224; in fn it is the reference. For normal rows each is 2.6 % of its
norm from the unquantised product, and 3.7 % from the other. Letters: T rows, K inner, N outer.
"""

from __future__ import annotations

import torch

from rocm_serve.ops.fp8 import multiply_1x128


def fp8_linear(x_TK: torch.Tensor, weight_NK: torch.Tensor, scale: torch.Tensor, *, activation: str) -> torch.Tensor:
    """Multiply quantised rows with an FP8 weight; shapes as in the reference.

    Errors: ValueError for an activation other than "fp8_1x128".
    """
    if activation != "fp8_1x128":
        raise ValueError(f"fp8_linear by aiter knows the activation fp8_1x128, not {activation!r}")
    top = torch.finfo(weight_NK.dtype).max
    return multiply_1x128(x_TK.float(), weight_NK, scale, top=top).to(x_TK.dtype)
