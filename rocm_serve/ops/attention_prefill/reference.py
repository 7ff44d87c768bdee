"""Causal attention of prompt rows: many rows a sequence, after its cached context.

Letters: T rows of the batch, H query heads, G key/value heads, D head size, P pages, S rows of a page.
"""

from __future__ import annotations

import torch

from rocm_serve.ops.attention import attend_paged
from rocm_serve.ops.batch import Sequences


def attention_prefill(
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
    """Write softmax(scale q k) v of the sequences' rows to their rows of `out`; other rows stay.

    Shapes: q, out [T, H, D]; pages [P, S, G, D] in float32, bf16 or FP8, with the rows of this step already in them;
    query head h reads key/value head h // (H / G) -> out. A row at position p sees the keys of positions 0..p.
    Numerics: fp32 inside, one rounding; a row's bits depend on its query and its keys alone. FP8 pages are
    multiplied by `k_scale` and `v_scale`.
    """
    attend_paged(q_THD, k_pages_PSGD, v_pages_PSGD, sequences, out_THD, scale=scale, k_scale=k_scale, v_scale=v_scale)
    return out_THD
