"""Gated full attention over paged keys and values.

Letters: T rows (N real ones), H query heads and G key/value heads of this rank, D head size.
"""

from __future__ import annotations

import torch
from torch import nn

from rocm_serve.layers.linear import ColumnParallelLinear, RowParallelLinear
from rocm_serve.layers.norm import RMSNorm
from rocm_serve.layers.rotary import RotaryTable
from rocm_serve.layers.weights import Weights
from rocm_serve.ops.batch import ForwardBatch
from rocm_serve.ops.bind import REFERENCE, BoundOps
from rocm_serve.ops.fp8 import kv_scale
from rocm_serve.parallel.comm import Comm


class GatedAttention(nn.Module):
    """Query and key norms, partial rotary, grouped heads, an output gate held beside each query head.

    The projection's rows are [q | gate] per head, then k, then v. `cache_key` names this layer's pages.
    One all-reduce, after o_proj. Where a kernel is bound as qk_norm_rope_kv_write, it does the work of qk_norm_rope and
    kv_write.
    """

    def __init__(
        self,
        weights: Weights,
        ops: BoundOps,
        comm: Comm,
        *,
        cache_key: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        eps: float,
        rotary: RotaryTable,
    ) -> None:
        super().__init__()
        self.qkv_proj = ColumnParallelLinear(weights.under("qkv_proj"), ops)
        self.q_norm = RMSNorm(weights.under("q_norm"), ops, eps=eps)
        self.k_norm = RMSNorm(weights.under("k_norm"), ops, eps=eps)
        self.o_proj = RowParallelLinear(weights.under("o_proj"), ops, comm)
        self.ops = ops
        self.rotary = rotary
        self.cache_key = cache_key
        self.heads = num_heads // comm.size
        self.kv_heads = max(1, num_kv_heads // comm.size)
        self.head_dim = head_dim
        self.eps = eps
        by_parts = ops.providers["qk_norm_rope_kv_write"].name == REFERENCE
        self._queries = self._queries_by_parts if by_parts else self._queries_at_once

        self._by_parts = False

    def run_by_parts(self) -> None:
        """Leave qk_norm_rope_kv_write alone from now on, so that each part's result can be seen."""
        self._queries, self._by_parts = self._queries_by_parts, True

    @property
    def first_weight(self) -> torch.Tensor | None:
        """Return the weight of the one product that reads the rows, where a norm may be part of it; else None."""
        return None if self._by_parts else self.qkv_proj.plain_weight

    def forward(self, x_TH: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        return self.after_first(self.qkv_proj(x_TH), batch)

    def after_first(self, qkv_TC: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Do what `forward` does, from the product with `first_weight` on."""
        t, d = qkv_TC.shape[0], self.head_dim
        out_THD = self._attend(self._queries(qkv_TC, batch), batch)
        gate_THD = qkv_TC[:, : self.heads * 2 * d].view(t, self.heads, 2 * d)[..., d:]
        return self.o_proj(self.ops.sigmoid_mul(out_THD, gate_THD).view(t, -1))

    def _queries_by_parts(self, qkv_TC: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Return the queries of the rows; store their keys and values."""
        t, d = qkv_TC.shape[0], self.head_dim
        kv = self.kv_heads * d
        qg, k, v = qkv_TC.split([self.heads * 2 * d, kv, kv], dim=-1)
        q_THD, k_TGD = self.ops.qk_norm_rope(
            qg.view(t, self.heads, 2 * d)[..., :d],
            k.view(t, self.kv_heads, d),
            self.q_norm.weight,
            self.k_norm.weight,
            self.rotary.cos_PR,
            self.rotary.sin_PR,
            batch.positions_T,
            eps=self.eps,
        )
        n = batch.num_rows
        pages = self._pages(batch)
        scale = kv_scale(pages[0].dtype)
        v_NGD = v.view(t, self.kv_heads, d)[:n]
        self.ops.kv_write(k_TGD[:n], v_NGD, *pages, batch.kv_index_N, k_scale=scale, v_scale=scale)
        return q_THD

    def _queries_at_once(self, qkv_TC: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        pages = self._pages(batch)
        scale = kv_scale(pages[0].dtype)
        return self.ops.qk_norm_rope_kv_write(
            qkv_TC,
            self.q_norm.weight,
            self.k_norm.weight,
            self.rotary.cos_PR,
            self.rotary.sin_PR,
            batch.positions_T,
            *pages,
            batch.kv_index_N,
            eps=self.eps,
            k_scale=scale,
            v_scale=scale,
        )

    def _pages(self, batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor]:
        return batch.cache.k_pages[self.cache_key], batch.cache.v_pages[self.cache_key]

    def _attend(self, q_THD: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        out_THD = torch.empty_like(q_THD)
        out_THD[batch.num_rows :] = 0
        pages = self._pages(batch)
        runs = batch.sequences.recurrent, batch.sequences.prompt
        stored = kv_scale(pages[0].dtype)
        for op, run in zip((self.ops.attention_decode, self.ops.attention_prefill), runs, strict=True):
            if run.num_sequences:
                op(q_THD, *pages, run, out_THD, scale=self.head_dim**-0.5, k_scale=stored, v_scale=stored)
        return out_THD
