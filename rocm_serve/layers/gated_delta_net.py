"""Gated DeltaNet: attention by a recurrent state.

Letters: T rows, h key heads and H value heads of this rank, K key head size, V value head size, C channels, G gates
(2 H: strengths b, then decays a), E rows of a step with drafts and those that it replays.
"""

from __future__ import annotations

import torch
from torch import nn

from rocm_serve.layers.linear import ColumnParallelLinear, RowParallelLinear
from rocm_serve.layers.weights import Weights
from rocm_serve.ops.batch import ForwardBatch, Replay, Sequences, StageCache
from rocm_serve.ops.bind import BoundOps
from rocm_serve.ops.replay import extended, keep_drafts
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
        self._channels = 2 * self.key_heads * key_dim + self.value_heads * value_dim

    def forward(self, x_TH: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        value = self.value_heads * self.value_dim
        u_TC, z = self.in_proj_qkvz(x_TH).split([self._channels, value], dim=-1)
        ba_TG = self.in_proj_ba(x_TH)
        out_THV = torch.zeros(len(x_TH), self.value_heads, self.value_dim, dtype=x_TH.dtype, device=x_TH.device)
        if batch.replay is None:
            self._advance(u_TC, ba_TG, batch.sequences, batch.cache, out_THV)
        else:
            self._verify(u_TC, ba_TG, batch, batch.replay, out_THV)
        gated_THV = self.norm(out_THV, z.view(-1, self.value_heads, self.value_dim))
        return self.out_proj(gated_THV.view(-1, value))

    def _advance(
        self, u_TC: torch.Tensor, ba_TG: torch.Tensor, sequences: Sequences, cache: StageCache, out_THV: torch.Tensor
    ) -> None:
        """Run these sequences over their rows, from and to the states of their slots."""
        key = self.key_heads * self.key_dim
        weight_CK = self.conv1d.weight.flatten(1)
        mixed_TC = self.ops.causal_conv(u_TC, weight_CK, cache.conv[self.cache_key], sequences)
        q, k, v = mixed_TC.split([key, key, self._channels - 2 * key], dim=-1)
        heads = (
            q.view(-1, self.key_heads, self.key_dim),
            k.view(-1, self.key_heads, self.key_dim),
            v.view(-1, self.value_heads, self.value_dim),
        )
        b_TH, a_TH = ba_TG.chunk(2, dim=-1)
        state = cache.ssm[self.cache_key]
        runs = sequences.recurrent, sequences.prompt
        for op, run in zip((self.ops.gdn_decode, self.ops.gdn_chunk), runs, strict=True):
            if run.num_sequences:
                op(*heads, a_TH, b_TH, self.A_log, self.dt_bias, state, run, out_THV)

    def _verify(
        self, u_TC: torch.Tensor, ba_TG: torch.Tensor, batch: ForwardBatch, replay: Replay, out_THV: torch.Tensor
    ) -> None:
        """As `_advance`; accepted drafts of the last step run before a sequence's rows, its own drafts on a copy."""
        cache = batch.cache
        pending = cache.pending_u[self.cache_key], cache.pending_ba[self.cache_key]
        u_EC, ba_EG = extended(u_TC, pending[0], replay), extended(ba_TG, pending[1], replay)
        out_EHV = out_THV.new_zeros(len(u_EC), self.value_heads, self.value_dim)
        self._advance(u_EC, ba_EG, replay.sequences, cache, out_EHV)
        out_THV[: len(replay.own_N)] = out_EHV[replay.own_N]
        keep_drafts(u_TC, pending[0], replay)
        keep_drafts(ba_TG, pending[1], replay)
        if batch.sequences.prompt.num_sequences:
            self._advance(u_TC, ba_TG, batch.sequences.prompt, cache, out_THV)
