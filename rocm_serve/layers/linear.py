"""Linear layers over tensor-parallel ranks. Letters: T rows, K inner, N outer, t ranks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from rocm_serve.layers.weights import OpWeights, Weights
from rocm_serve.ops.bind import BoundOps
from rocm_serve.parallel.comm import Comm


class Linear(OpWeights):
    """x @ weight.T with what this rank holds of the weight; no collective. FP8 when the table says so.

    Alone it is a replicated layer, or a column-parallel one: outputs of this rank stay on this rank.
    """

    def __init__(self, weights: Weights, ops: BoundOps) -> None:
        super().__init__()
        self.weight = weights.make("weight")
        self.ops = ops
        self.weight_scale_inv: nn.Parameter | None = None
        if weights.is_fp8("weight"):
            self.weight_scale_inv = weights.make("weight_scale_inv")

    def op_weights(self) -> tuple[str, Mapping[str, str]]:
        if self.weight_scale_inv is None:
            return "linear", {"weight_NK": "weight"}
        return "fp8_linear", {"weight_NK": "weight", "scale": "weight_scale_inv"}

    @property
    def plain_weight(self) -> nn.Parameter | None:
        """Return the weight where it stays as the checkpoint has it, and is no FP8; else None."""
        return None if self.weight_scale_inv is not None or "linear" in self.ops.preparing else self.weight

    def forward(self, x_TK: torch.Tensor) -> torch.Tensor:
        if self.weight_scale_inv is None:
            return self.ops.linear(x_TK, self.weight)
        return self.ops.fp8_linear(x_TK, self.weight, self.weight_scale_inv, activation=self.ops.fp8_activation)


class ColumnParallelLinear(Linear):
    """Each rank holds rows of the weight and computes its own outputs [T, N / t]."""


class RowParallelLinear(Linear):
    """Each rank holds columns of the weight; the partial products are summed over ranks: the one collective."""

    def __init__(self, weights: Weights, ops: BoundOps, comm: Comm) -> None:
        super().__init__(weights, ops)
        self.comm = comm

    def partial(self, x_TK: torch.Tensor) -> torch.Tensor:
        """Return this rank's addend, for a caller that has more to add before the collective."""
        return super().forward(x_TK)

    def forward(self, x_TK: torch.Tensor) -> torch.Tensor:
        return self.comm.all_reduce(self.partial(x_TK))
