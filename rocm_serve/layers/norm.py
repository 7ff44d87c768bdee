"""RMS norm with a zero-centred weight. Letters: T rows, H width."""

from __future__ import annotations

import torch
from torch import nn

from rocm_serve.layers.weights import Weights
from rocm_serve.ops.bind import BoundOps


class RMSNorm(nn.Module):
    """x / rms(x) * (1 + w). Every norm of the family but the one inside Gated DeltaNet."""

    def __init__(self, weights: Weights, ops: BoundOps, *, eps: float) -> None:
        super().__init__()
        self.weight = weights.make("weight")
        self.ops = ops
        self.eps = eps

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        return self.ops.rms_norm(x_TH, self.weight, eps=self.eps, plus_one=True)

    def add(self, x_TH: torch.Tensor, residual_TH: torch.Tensor) -> torch.Tensor:
        """Add `x` to the residual stream in place and return the norm of the sum."""
        return self.ops.add_rms_norm(x_TH, residual_TH, self.weight, eps=self.eps, plus_one=True)

    def add_into(
        self, x_TH: torch.Tensor, residual_TH: torch.Tensor, weight_NH: torch.Tensor, total_TH: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the sum of `x` and the residual stream to `total`; return a product of its norm, and the norm."""
        return self.ops.add_norm_linear(
            x_TH, residual_TH, self.weight, weight_NH, total_TH, eps=self.eps, plus_one=True
        )
