"""Inputs of qk_norm_rope_kv_write that matter."""

from __future__ import annotations

from functools import partial

import torch

from rocm_serve.ops.contract import Arguments, Case
from rocm_serve.ops.inputs import normal
from rocm_serve.ops.kv_write.cases import kv_case
from rocm_serve.ops.qk_norm_rope.cases import qk_case


def qkv_case(
    g: torch.Generator,
    dtype: torch.dtype,
    *,
    t: int,
    padding: int = 0,
    skipped: int = 0,
    heads: int = 8,
    kv_heads: int = 2,
    d: int = 128,
    rotated: int = 32,
    page_size: int = 16,
    scale: float = 1.0,
    eps: float = 1e-6,
    stored: torch.dtype | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Arguments:
    """Rows of a projection; the last `padding` have no place, and `skipped` before them a negative one."""
    turned = qk_case(g, dtype, t=t, d=d, rotated=rotated, eps=eps)
    written = kv_case(
        g,
        dtype,
        n=t - padding,
        kv_heads=kv_heads,
        d=d,
        page_size=page_size,
        stored=stored,
        k_scale=k_scale,
        v_scale=v_scale,
        skipped=skipped,
    )
    kept = ("q_weight_D", "k_weight_D", "cos_PR", "sin_PR", "positions_T")
    placed = ("k_pages_PSGD", "v_pages_PSGD", "index_N", "k_scale", "v_scale")
    return {
        "qkv_TC": normal(g, t, 2 * (heads + kv_heads) * d, scale=scale, dtype=dtype),
        **{name: turned[name] for name in kept},
        **{name: written[name] for name in placed},
        "eps": eps,
    }


_FP8 = torch.float8_e4m3fn
CASES: dict[str, Case] = {
    "no rows": partial(qkv_case, t=0),
    "one row": partial(qkv_case, t=1),
    "odd sizes": partial(qkv_case, t=37, heads=3, kv_heads=1, d=20, rotated=6, page_size=5),
    "padded rows": partial(qkv_case, t=9, padding=2, skipped=3),
    "padded rows alone": partial(qkv_case, t=2, padding=2),
    "all dimensions turn": partial(qkv_case, t=9, d=64, rotated=64),
    "eps matters": partial(qkv_case, t=9, scale=1e-3, eps=1e-5),
    "float32 pages": partial(qkv_case, t=5, stored=torch.float32),
    "fp8 pages": partial(qkv_case, t=9, stored=_FP8),
    "fp8 pages, scales": partial(qkv_case, t=9, stored=_FP8, k_scale=0.25, v_scale=3.0),
    "2.4T heads at tp 8": partial(qkv_case, t=5, heads=8, kv_heads=1, d=256, rotated=64),
}
