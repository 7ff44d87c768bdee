"""Inputs of qk_norm_rope that matter."""

from __future__ import annotations

from functools import partial

import torch

from rocm_serve.ops.contract import Arguments, Case
from rocm_serve.ops.inputs import normal


def qk_case(
    g: torch.Generator,
    dtype: torch.dtype,
    *,
    t: int,
    heads: int = 8,
    kv_heads: int = 2,
    d: int = 128,
    rotated: int = 32,
    scale: float = 1.0,
    eps: float = 1e-6,
) -> Arguments:
    """Query heads cut out of wider rows, key heads, and a table of angles."""
    angle = torch.arange(600)[:, None] * 1e4 ** (-torch.arange(0, rotated, 2) / rotated)
    return {
        "q_THD": normal(g, t, heads, 2 * d, scale=scale, dtype=dtype)[..., :d],
        "k_TGD": normal(g, t, kv_heads, d, scale=scale, dtype=dtype),
        "q_weight_D": normal(g, d, scale=0.3, dtype=dtype),
        "k_weight_D": normal(g, d, scale=0.3, dtype=dtype),
        "cos_PR": angle.cos(),
        "sin_PR": angle.sin(),
        "positions_T": torch.randint(0, 600, (t,), generator=g),
        "eps": eps,
    }


CASES: dict[str, Case] = {
    "no rows": partial(qk_case, t=0),
    "one row": partial(qk_case, t=1),
    "odd sizes": partial(qk_case, t=37, heads=3, kv_heads=1, d=20, rotated=6),
    "all dimensions turn": partial(qk_case, t=9, d=64, rotated=64),
    "eps matters": partial(qk_case, t=9, scale=1e-3, eps=1e-5),
    "2.4T heads": partial(qk_case, t=5, heads=64, kv_heads=4, d=256, rotated=64),
}
