"""What both forms of the gated delta rule share. Letters: T rows, H value heads, h key heads, D head size."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from rocm_serve.ops.rows import fresh_float, pad_rows, steady_

L2_EPS = 1e-6


def softplus_(x: torch.Tensor) -> torch.Tensor:
    """Replace x by log(1 + exp(x)); x itself above 20."""
    return x.copy_(F.softplus(x))


def gates(
    a_TH: torch.Tensor, b_TH: torch.Tensor, a_log_H: torch.Tensor, dt_bias_H: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log decay g <= 0 and the write strength beta in (0, 1), both fp32 [T, H].

    Source: g = -exp(A_log) softplus(a + dt_bias), beta = sigmoid(b).
    """
    g_TH = steady_(softplus_, fresh_float(a_TH).add_(dt_bias_H)).mul_(-torch.exp(a_log_H.float()))
    return g_TH, steady_(torch.sigmoid_, fresh_float(b_TH))


def unit(x_ThD: torch.Tensor) -> torch.Tensor:
    """Return heads of length one in fp32: x / sqrt(sum(x^2) + 1e-6)."""
    x = pad_rows(x_ThD.float())
    return (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS))[: x_ThD.shape[0]]
