"""The dense MLP. Letters: T rows, H width."""

from __future__ import annotations

import torch
from torch import nn

from rocm_serve.layers.linear import ColumnParallelLinear, RowParallelLinear
from rocm_serve.layers.weights import Weights
from rocm_serve.ops.bind import BoundOps
from rocm_serve.parallel.comm import Comm


class GatedMLP(nn.Module):
    """down(silu(gate x) * (up x)). One all-reduce, after down_proj."""

    def __init__(self, weights: Weights, ops: BoundOps, comm: Comm) -> None:
        super().__init__()
        self.gate_up_proj = ColumnParallelLinear(weights.under("gate_up_proj"), ops)
        self.down_proj = RowParallelLinear(weights.under("down_proj"), ops, comm)
        self.ops = ops

    def partial(self, x_TH: torch.Tensor) -> torch.Tensor:
        """Return this rank's addend, for a caller that has more to add before the collective."""
        return self.partial_of(self.gate_up_proj(x_TH))

    def partial_of(self, gate_up_TI: torch.Tensor) -> torch.Tensor:
        """Do what `partial` does from the first product on: gate and up of each row, [T, 2 I]."""
        return self.down_proj.partial(self.ops.silu_mul(gate_up_TI))

    def forward(self, x_TH: torch.Tensor, num_rows: int | torch.Tensor) -> torch.Tensor:
        """Run all rows; `num_rows` is for layers that can leave padding out."""
        return self.down_proj(self.ops.silu_mul(self.gate_up_proj(x_TH)))

    @property
    def first_weight(self) -> torch.Tensor | None:
        """Return the weight of the one product that reads the rows, where it is plain."""
        return self.gate_up_proj.plain_weight

    def after_first(self, gate_up_TI: torch.Tensor, x_TH: torch.Tensor, num_rows: int | torch.Tensor) -> torch.Tensor:
        """Do what `forward` does, from the product with `first_weight` on."""
        return self.down_proj(self.ops.silu_mul(gate_up_TI))
