"""Causal attention of rows past the prompt by AITER's unified attention, a Triton kernel over linear pages.

Letters: T rows of the batch, H query heads, G key/value heads, D head size, P pages, S rows of a page.
"""

from __future__ import annotations

import torch
from aiter.ops.triton.attention.unified_attention import unified_attention

from rocm_serve.ops.batch import Sequences


def attention_decode(
    q_THD: torch.Tensor,
    k_pages_PSGD: torch.Tensor,
    v_pages_PSGD: torch.Tensor,
    sequences: Sequences,
    out_THD: torch.Tensor,
    *,
    scale: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    """Write softmax(scale q k) v of the sequences' rows to their rows of `out`; see the reference.

    Lengths are passed as int64: the kernel computes addresses in their width, and int32 overflows past 2 GiB of pages.
    """
    counts = [last - first for first, last in zip(sequences.row_starts, sequences.row_starts[1:], strict=False)]
    if not any(counts):
        return out_THD
    kept = k_pages_PSGD.dtype.itemsize == 1
    assert kept or k_scale == v_scale == 1.0, f"scales {k_scale}, {v_scale} for {k_pages_PSGD.dtype} pages"

    def descale(one: float) -> torch.Tensor | None:
        return torch.full((1,), one, dtype=torch.float32, device=q_THD.device) if kept else None

    unified_attention(
        q=q_THD[sequences.rows].contiguous(),
        k=k_pages_PSGD,
        v=v_pages_PSGD,
        out=out_THD[sequences.rows],
        cu_seqlens_q=sequences.row_starts_B1 - sequences.row_starts[0],
        max_seqlen_q=max(counts),
        seqused_k=(sequences.contexts_B + sequences.row_starts_B1.diff()).long(),
        max_seqlen_k=max(c + n for c, n in zip(sequences.contexts, counts, strict=True)),
        softmax_scale=scale,
        causal=True,
        window_size=(-1, -1),
        block_table=sequences.page_table_BP,
        softcap=0.0,
        q_descale=None,
        k_descale=descale(k_scale),
        v_descale=descale(v_scale),
    )
    return out_THD
