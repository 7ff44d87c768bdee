"""The experts with FP8 rows, but with hidden rows as they are: what tells right results from near ones.

Letters: T rows, H width, I expert width, E experts, k choices a row.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from rocm_serve.ops.fp8 import dequantise, quantise_rows
from rocm_serve.ops.moe_experts.reference import experts


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
    """Compute the experts of rows that are quantised, or were sent so, without quantising hidden rows -> fp32 [T, H].

    Shapes as in the reference. Results whose hidden rows are quantised are as far from it whatever codes last bits
    choose. For FP8 weights and "fp8_1x128" alone.
    """
    assert activation == "fp8_1x128" and w13_scale is not None, "nothing else quantises hidden rows"
    if x_scale is None:
        x_TH, x_scale = quantise_rows(x_TH, w13_EIH.dtype)
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
        multiply=lambda x_nK, w_NK, scale: F.linear(x_nK, dequantise(w_NK, scale)),
        out_dtype=torch.float32,
    )
