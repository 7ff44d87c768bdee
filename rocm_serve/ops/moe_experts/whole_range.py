"""The experts as AITER means them: rows of both products quantised to the largest number of the weights' dtype.

See fp8_linear/whole_range.py. Letters: T rows, H width, I expert width, E experts, k choices a row.
"""

from __future__ import annotations

from functools import partial

import torch

from rocm_serve.ops.fp8 import multiply_1x128
from rocm_serve.ops.moe_experts.reference import check_quantised, experts


def moe_experts(
    x_TH: torch.Tensor,
    ids_Tk: torch.Tensor,
    weights_Tk: torch.Tensor,
    num_rows: int | torch.Tensor,
    w13_EIH: torch.Tensor,
    w2_EHI: torch.Tensor,
    w13_scale: torch.Tensor | None = None,
    w2_scale: torch.Tensor | None = None,
    x_scale: torch.Tensor | None = None,
    *,
    activation: str,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Run each row through its chosen experts and sum what they return, weighted; shapes as in the reference.

    Rows with `x_scale` are taken as they are, whatever range they were quantised to.
    Errors: ValueError for FP8 weights with an activation other than "fp8_1x128"; as the reference for `x_scale`.
    """
    if w13_scale is not None and activation != "fp8_1x128":
        raise ValueError(f"moe_experts by aiter knows the activation fp8_1x128 for FP8 weights, not {activation!r}")
    check_quantised(x_scale, w13_scale, activation, out_dtype)
    multiply = partial(multiply_1x128, top=torch.finfo(w13_EIH.dtype).max)
    return experts(
        x_TH,
        ids_Tk,
        weights_Tk,
        num_rows,
        w13_EIH,
        w2_EHI,
        w13_scale,
        w2_scale,
        x_scale,
        multiply=multiply,
        out_dtype=out_dtype,
    )
