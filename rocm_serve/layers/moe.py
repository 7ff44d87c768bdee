"""Mixture of experts with a shared expert. Letters: T rows, H width, E experts, I expert width of this rank."""

from __future__ import annotations

import torch
from torch import nn

from rocm_serve.layers.linear import Linear
from rocm_serve.layers.mlp import GatedMLP
from rocm_serve.layers.weights import FP8, Weights
from rocm_serve.ops.bind import BoundOps
from rocm_serve.parallel.comm import Comm


class RoutedExperts(nn.Module):
    """The stacked weights of the routed experts: [E, 2 I, H] (gate rows, then up rows) and [E, H, I]."""

    def __init__(self, weights: Weights, ops: BoundOps) -> None:
        super().__init__()
        self.gate_up_proj = weights.make("gate_up_proj")
        self.down_proj = weights.make("down_proj")
        self.gate_up_proj_scale_inv = self._scale(weights, "gate_up_proj", self.gate_up_proj)
        self.down_proj_scale_inv = self._scale(weights, "down_proj", self.down_proj)
        self.ops = ops

    @staticmethod
    def _scale(weights: Weights, name: str, weight: torch.Tensor) -> nn.Parameter | None:
        return weights.make(f"{name}_scale_inv") if weight.dtype == FP8 else None

    def forward(
        self, x_TH: torch.Tensor, ids_Tk: torch.Tensor, weights_Tk: torch.Tensor, num_rows: int
    ) -> torch.Tensor:
        return self.ops.moe_experts(
            x_TH,
            ids_Tk,
            weights_Tk,
            num_rows,
            self.gate_up_proj,
            self.down_proj,
            self.gate_up_proj_scale_inv,
            self.down_proj_scale_inv,
            activation=self.ops.fp8_activation,
        )


class SparseMoe(nn.Module):
    """Routed experts plus a gated shared expert. Router and shared gate are whole on every rank.

    The partial sums of both halves are joined before the one all-reduce.
    """

    def __init__(self, weights: Weights, ops: BoundOps, comm: Comm, *, top_k: int, renormalise: bool) -> None:
        super().__init__()
        self.gate = Linear(weights.under("gate"), ops)
        self.shared_expert_gate = Linear(weights.under("shared_expert_gate"), ops)
        self.shared_expert = GatedMLP(weights.under("shared_expert"), ops, comm)
        self.experts = RoutedExperts(weights.under("experts"), ops)
        self.ops = ops
        self.comm = comm
        self.top_k = top_k
        self.renormalise = renormalise

    def forward(self, x_TH: torch.Tensor, num_rows: int) -> torch.Tensor:
        """Run the first `num_rows` rows through their experts; the rest is padding."""
        ids_Tk, weights_Tk = self.ops.moe_route(self.gate(x_TH), top_k=self.top_k, renormalise=self.renormalise)
        routed_TH = self.experts(x_TH, ids_Tk, weights_Tk, num_rows)
        shared_TH = self.ops.sigmoid_mul(self.shared_expert.partial(x_TH), self.shared_expert_gate(x_TH))
        return self.comm.all_reduce(routed_TH + shared_TH)
