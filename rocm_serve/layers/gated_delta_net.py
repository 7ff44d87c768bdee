"""Gated DeltaNet: attention by a recurrent state.

Letters: T rows, h key heads and H value heads of this rank, K key head size, V value head size, C channels.
"""

from __future__ import annotations

import torch
from torch import nn

from rocm_serve.layers.linear import ColumnParallelLinear, RowParallelLinear
from rocm_serve.layers.weights import Weights
from rocm_serve.ops.batch import ForwardBatch
from rocm_serve.ops.bind import BoundOps
from rocm_serve.parallel.comm import Comm


class Conv1d(nn.Module):
    """The weight of the depthwise convolution, [C, 1, taps]."""

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        self.weight = weights.make("weight")


class GatedRMSNorm(nn.Module):
    """Norm over each value head, then the gate. The weight is used as it is."""

    def __init__(self, weights: Weights, ops: BoundOps, *, eps: float, activation: str) -> None:
        super().__init__()
        self.weight = weights.make("weight")
        self.ops = ops
        self.eps = eps
        self.activation = activation

    def forward(self, x_THV: torch.Tensor, gate_THV: torch.Tensor) -> torch.Tensor:
        return self.ops.gated_rms_norm(x_THV, gate_THV, self.weight, eps=self.eps, activation=self.activation)


class GatedDeltaNet(nn.Module):
    """Short convolution, gated delta rule, gated norm.

    The projection's rows are q, k, v (these go through the convolution), then z (the output gate). `cache_key` names
    this layer's states. One all-reduce, after out_proj.
    """

    def __init__(
        self,
        weights: Weights,
        ops: BoundOps,
        comm: Comm,
        *,
        cache_key: int,
        key_heads: int,
        value_heads: int,
        key_dim: int,
        value_dim: int,
        eps: float,
        gate_activation: str,
    ) -> None:
        super().__init__()
        self.in_proj_qkvz = ColumnParallelLinear(weights.under("in_proj_qkvz"), ops)
        self.in_proj_ba = ColumnParallelLinear(weights.under("in_proj_ba"), ops)
        self.conv1d = Conv1d(weights.under("conv1d"))
        self.A_log = weights.make("A_log")
        self.dt_bias = weights.make("dt_bias")
        self.norm = GatedRMSNorm(weights.under("norm"), ops, eps=eps, activation=gate_activation)
        self.out_proj = RowParallelLinear(weights.under("out_proj"), ops, comm)
        self.ops = ops
        self.cache_key = cache_key
        self.key_heads, self.value_heads = key_heads // comm.size, value_heads // comm.size
        self.key_dim, self.value_dim = key_dim, value_dim

    def forward(self, x_TH: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        t = x_TH.shape[0]
        key, value = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        u_TC, z = self.in_proj_qkvz(x_TH).split([2 * key + value, value], dim=-1)
        b_TH, a_TH = self.in_proj_ba(x_TH).chunk(2, dim=-1)
        weight_CK = self.conv1d.weight.flatten(1)
        mixed_TC = self.ops.causal_conv(u_TC, weight_CK, batch.cache.conv[self.cache_key], batch.sequences)
        q, k, v = mixed_TC.split([key, key, value], dim=-1)
        heads = (
            q.view(t, self.key_heads, self.key_dim),
            k.view(t, self.key_heads, self.key_dim),
            v.view(t, self.value_heads, self.value_dim),
        )
        out_THV = torch.zeros(t, self.value_heads, self.value_dim, dtype=x_TH.dtype, device=x_TH.device)
        state = batch.cache.ssm[self.cache_key]
        runs = batch.sequences.recurrent, batch.sequences.prompt
        for op, run in zip((self.ops.gdn_decode, self.ops.gdn_chunk), runs, strict=True):
            if run.num_sequences:
                op(*heads, a_TH, b_TH, self.A_log, self.dt_bias, state, run, out_THV)
        gated_THV = self.norm(out_THV, z.view(t, self.value_heads, self.value_dim))
        return self.out_proj(gated_THV.view(t, value))
