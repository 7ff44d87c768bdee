"""What stands between attention's projection and its product: query and key norms, rotary embedding, keys and values
stored.

Letters: T rows, N of them real, C columns of the projection, H query heads, G key/value heads, D head size,
P pages of S rows (of the table of angles: P positions), R half of the rotated dimensions.
"""

from __future__ import annotations

import torch

from rocm_serve.ops.kv_write.reference import kv_write
from rocm_serve.ops.qk_norm_rope.reference import qk_norm_rope


def qk_norm_rope_kv_write(
    qkv_TC: torch.Tensor,
    q_weight_D: torch.Tensor,
    k_weight_D: torch.Tensor,
    cos_PR: torch.Tensor,
    sin_PR: torch.Tensor,
    positions_T: torch.Tensor,
    k_pages_PSGD: torch.Tensor,
    v_pages_PSGD: torch.Tensor,
    index_N: torch.Tensor,
    *,
    eps: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    """Return the queries of a projection, normed and turned, and write its keys, as those, and values into the pages.

    Shapes: qkv [T, C], C = 2 H D + 2 G D: [query | output gate] of each query head, then keys, then values; cos and
    sin fp32 [P, R], positions int [T]; pages [P, S, G, D], index int64 [N] -> q [T, H, D]. The gate is not read.
    Semantics and numerics: qk_norm_rope, whose keys are rounded to the dtype of the rows, then kv_write.
    """
    groups, d = k_pages_PSGD.shape[2:]
    t, kv = qkv_TC.shape[0], groups * d
    heads = qkv_TC.shape[1] // (2 * d) - groups
    qg, k, v = qkv_TC.split([heads * 2 * d, kv, kv], dim=-1)
    q_THD, k_TGD = qk_norm_rope(
        qg.view(t, heads, 2 * d)[..., :d],
        k.view(t, groups, d),
        q_weight_D,
        k_weight_D,
        cos_PR,
        sin_PR,
        positions_T,
        eps=eps,
    )
    n = index_N.shape[0]
    pages = k_pages_PSGD, v_pages_PSGD
    kv_write(k_TGD[:n], v.view(t, groups, d)[:n], *pages, index_N, k_scale=k_scale, v_scale=v_scale)
    return q_THD
