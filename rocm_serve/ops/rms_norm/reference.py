"""RMS norm and its form with the residual add. Letters: T rows, H width."""

from __future__ import annotations

import torch


def rms_norm(x_TH: torch.Tensor, weight_H: torch.Tensor, *, eps: float, plus_one: bool) -> torch.Tensor:
    """Normalise each row by its root mean square and scale it.

    Shapes: x [..., H], weight [H] -> [..., H], dtype of x.
    Numerics: fp32 inside, one rounding. `plus_one`: the weight is stored minus one (zero-centred).
    Source: x / sqrt(mean(x^2) + eps) * (1 + w), Qwen3_5MoeRMSNorm.
    """
    x = x_TH.float()
    scale = weight_H.float() + 1.0 if plus_one else weight_H.float()
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * scale).to(x_TH.dtype)


def add_rms_norm(
    x_TH: torch.Tensor, residual_TH: torch.Tensor, weight_H: torch.Tensor, *, eps: float, plus_one: bool
) -> torch.Tensor:
    """Add `x` to the residual stream in place and return the norm of the sum.

    Shapes: x, residual [T, H], weight [H] -> [T, H]. `residual` holds x + residual afterwards.
    Numerics: the sum is rounded to the stream's dtype before it is normalised.
    """
    residual_TH += x_TH
    return rms_norm(residual_TH, weight_H, eps=eps, plus_one=plus_one)
