"""What a layer adds to the residual stream, its norm, and the product of that. Letters: T rows, H width, N outer."""

from __future__ import annotations

import torch

from rocm_serve.ops.linear.reference import linear
from rocm_serve.ops.rms_norm.reference import rms_norm


def add_norm_linear(
    x_TH: torch.Tensor,
    residual_TH: torch.Tensor,
    norm_weight_H: torch.Tensor,
    weight_NH: torch.Tensor,
    total_TH: torch.Tensor,
    *,
    eps: float,
    plus_one: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return linear(norm, weight) and the norm itself, where norm = rms_norm(x + residual).

    Shapes: x, residual, total [T, H], norm_weight [H], weight [N, H] -> [T, N] and [T, H]. T is at most FOLDED_ROWS of
    ops/tiles_linear.py. `total` holds x + residual afterwards; it is other memory than x and residual.
    Numerics: the sum, the norm and the product are each rounded once, as add_rms_norm and linear do.
    """
    total_TH.copy_(residual_TH + x_TH)
    normed_TH = rms_norm(total_TH, norm_weight_H, eps=eps, plus_one=plus_one)
    return linear(normed_TH, weight_NH), normed_TH
