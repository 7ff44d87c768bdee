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
from rocm_serve.ops.bind import REFERENCE, BoundOps
from rocm_serve.ops.replay import extended, keep_drafts
from rocm_serve.ops.rows import zero_outside
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
    this layer's states. One all-reduce, after out_proj. Where a kernel is bound as gdn_step, rows past the prompt take
    it, in every step: their bits then do not depend on whether prompts or drafts run beside them.
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
        self._widths = [self._channels, self.value_heads * value_dim, 2 * self.value_heads]
        self._in_proj: torch.Tensor | None = None
        self._run, self._project = self._by_parts, self._project_apart
        if ops.providers["gdn_step"].name != REFERENCE:
            self._run = self._by_steps
            self._join_projections()

    def run_by_parts(self) -> None:
        """Leave gdn_step and the joined projection alone from now on, so that each part's result can be seen."""
        self._run, self._project, self._in_proj = self._by_parts, self._project_apart, None

    def _join_projections(self) -> None:
        """Make both projections rows of one weight, where both are plain: one product then makes q, k, v, z, b, a."""
        first, second = self.in_proj_qkvz.plain_weight, self.in_proj_ba.plain_weight
        if first is not None and second is not None and first.dtype == second.dtype:
            self._in_proj = first.new_empty(len(first) + len(second), first.shape[1])
            first.data, second.data = self._in_proj.split([len(first), len(second)])
            self._project = self._project_at_once

    @property
    def first_weight(self) -> torch.Tensor | None:
        """Return the weight of the one product that reads the rows, where a norm may be part of it; else None."""
        return self._in_proj

    def forward(self, x_TH: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        return self._after(self._project(x_TH), batch)

    def after_first(self, made_TN: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Do what `forward` does, from the product with `first_weight` on."""
        return self._after(made_TN.split(self._widths, dim=-1), batch)

    def _after(self, projected: tuple[torch.Tensor, ...], batch: ForwardBatch) -> torch.Tensor:
        value = self.value_heads * self.value_dim
        u_TC, z, ba_TG = projected
        gated_THV = self._run(u_TC, ba_TG, z.view(-1, self.value_heads, self.value_dim), batch)
        return self.out_proj(gated_THV.view(-1, value))

    def _project_apart(self, x_TH: torch.Tensor) -> tuple[torch.Tensor, ...]:
        qkvz = self.in_proj_qkvz(x_TH)
        return *qkvz.split([self._channels, self.value_heads * self.value_dim], dim=-1), self.in_proj_ba(x_TH)

    def _project_at_once(self, x_TH: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.ops.linear(x_TH, self._in_proj).split(self._widths, dim=-1)

    def _by_parts(
        self, u_TC: torch.Tensor, ba_TG: torch.Tensor, z_THV: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        """Convolution, rule and norm, an op each."""
        out_THV = self._zeros(u_TC)
        if batch.replay is None:
            self._advance(u_TC, ba_TG, batch.sequences, batch.cache, out_THV)
        else:
            self._verify(u_TC, ba_TG, batch, batch.replay, out_THV)
        return self.norm(out_THV, z_THV)

    def _by_steps(
        self, u_TC: torch.Tensor, ba_TG: torch.Tensor, z_THV: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        """Rows past the prompt by one op, drafts and what they replay too; prompt rows by parts."""
        sequences, replay = batch.sequences, batch.replay
        if sequences.num_recurrent == sequences.num_sequences and replay is None:
            return self._step(u_TC, ba_TG, z_THV, sequences, batch.cache)
        if not sequences.num_recurrent and replay is None:
            return self.norm(self._read_by_prompts(u_TC, ba_TG, sequences, batch), z_THV)
        if replay is not None:
            y_NHV = self._step_with_drafts(u_TC, ba_TG, z_THV, batch, replay)
            if len(y_NHV) == len(u_TC):
                return y_NHV
        y_THV = self._zeros(u_TC)
        if replay is not None:
            y_THV[: len(y_NHV)] = y_NHV
        elif sequences.num_recurrent:
            y_THV = self._step(u_TC, ba_TG, z_THV, sequences.recurrent, batch.cache)
        prompt = sequences.prompt
        if prompt.num_sequences:
            read_THV = self._read_by_prompts(u_TC, ba_TG, prompt, batch)
            y_THV[prompt.rows] = self.norm(read_THV[prompt.rows], z_THV[prompt.rows])
        return y_THV

    def _read_by_prompts(
        self, u_TC: torch.Tensor, ba_TG: torch.Tensor, prompt: Sequences, batch: ForwardBatch
    ) -> torch.Tensor:
        """Return what rows of prompts read, [T, H, V]; rows of no sequence are zeros."""
        if batch.live_rows is None:
            read_THV = zero_outside(u_TC.new_empty(len(u_TC), self.value_heads, self.value_dim), prompt.rows)
        else:  # the device may know fewer rows of them than the host does
            read_THV = self._zeros(u_TC)
        self._advance(u_TC, ba_TG, prompt, batch.cache, read_THV)
        return read_THV

    def _step_with_drafts(
        self, u_TC: torch.Tensor, ba_TG: torch.Tensor, z_THV: torch.Tensor, batch: ForwardBatch, replay: Replay
    ) -> torch.Tensor:
        """Return the rows past the prompt [N, H, V], once accepted drafts of the last step have run before them."""
        x_EW = self.ops.gdn_extend(
            u_TC,
            ba_TG,
            z_THV.flatten(1),
            batch.cache.pending_u[self.cache_key],
            batch.cache.pending_ba[self.cache_key],
            batch.sequences.recurrent,
            replay.sequences,
            rows=replay.num_rows,
        )
        u_EC, z_EV, ba_EG = x_EW.split(self._widths, dim=-1)
        z_EHV = z_EV.unflatten(1, (self.value_heads, self.value_dim))
        return self._step(u_EC, ba_EG, z_EHV, replay.sequences, batch.cache)[replay.own_N]

    def _step(
        self, u_TC: torch.Tensor, ba_TG: torch.Tensor, z_THV: torch.Tensor, sequences: Sequences, cache: StageCache
    ) -> torch.Tensor:
        b_TH, a_TH = ba_TG.chunk(2, dim=-1)
        return self.ops.gdn_step(
            u_TC,
            self.conv1d.weight.flatten(1),
            cache.conv[self.cache_key],
            a_TH,
            b_TH,
            self.A_log,
            self.dt_bias,
            cache.ssm[self.cache_key],
            z_THV,
            self.norm.weight,
            sequences,
            eps=self.norm.eps,
            activation=self.norm.activation,
        )

    def _zeros(self, rows_TC: torch.Tensor) -> torch.Tensor:
        return rows_TC.new_zeros(len(rows_TC), self.value_heads, self.value_dim)

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
        u_EC, ba_EG = self._extended(u_TC, ba_TG, batch.cache, replay)
        out_EHV = self._zeros(u_EC)
        self._advance(u_EC, ba_EG, replay.sequences, batch.cache, out_EHV)
        out_THV[: len(replay.own_N)] = out_EHV[replay.own_N]
        self._keep_drafts(u_TC, ba_TG, batch.cache, replay)
        if batch.sequences.prompt.num_sequences:
            self._advance(u_TC, ba_TG, batch.sequences.prompt, batch.cache, out_THV)

    def _extended(
        self, u_TC: torch.Tensor, ba_TG: torch.Tensor, cache: StageCache, replay: Replay
    ) -> tuple[torch.Tensor, torch.Tensor]:
        u_EC = extended(u_TC, cache.pending_u[self.cache_key], replay)
        return u_EC, extended(ba_TG, cache.pending_ba[self.cache_key], replay)

    def _keep_drafts(self, u_TC: torch.Tensor, ba_TG: torch.Tensor, cache: StageCache, replay: Replay) -> None:
        keep_drafts(u_TC, cache.pending_u[self.cache_key], replay)
        keep_drafts(ba_TG, cache.pending_ba[self.cache_key], replay)
