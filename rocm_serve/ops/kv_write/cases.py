"""Inputs of kv_write that matter."""

from __future__ import annotations

from functools import partial

import torch

from rocm_serve.ops.contract import Arguments, Case
from rocm_serve.ops.inputs import normal


def kv_case(
    g: torch.Generator,
    dtype: torch.dtype,
    *,
    n: int,
    kv_heads: int = 2,
    d: int = 128,
    page_size: int = 16,
    stored: torch.dtype | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    magnitude: float = 1.0,
    skipped: int = 0,
) -> Arguments:
    """Rows and the shuffled places of pages where they go; the last `skipped` rows go nowhere."""
    shape = (n // page_size + 3, page_size, kv_heads, d)
    index = torch.randperm(shape[0] * page_size, generator=g)[:n]
    index[n - skipped :] = -1
    return {
        "k_NGD": normal(g, n, kv_heads, d, scale=magnitude, dtype=dtype),
        "v_NGD": normal(g, n, kv_heads, d, scale=magnitude, dtype=dtype),
        "k_pages_PSGD": normal(g, *shape).to(stored or dtype),
        "v_pages_PSGD": normal(g, *shape).to(stored or dtype),
        "index_N": index,
        "k_scale": k_scale,
        "v_scale": v_scale,
    }


_FP8 = torch.float8_e4m3fn
CASES: dict[str, Case] = {
    "no rows": partial(kv_case, n=0),
    "one row": partial(kv_case, n=1),
    "odd sizes": partial(kv_case, n=37, kv_heads=3, d=20, page_size=5),
    "padded rows": partial(kv_case, n=7, skipped=3),
    "padded rows alone": partial(kv_case, n=2, skipped=2, stored=_FP8),
    "float32 pages": partial(kv_case, n=9, stored=torch.float32),
    "bf16 pages": partial(kv_case, n=9, stored=torch.bfloat16),
    "fp8 pages": partial(kv_case, n=9, stored=_FP8),
    "fp8 pages, too large": partial(kv_case, n=9, stored=_FP8, magnitude=500.0),
    "fp8 pages, scales": partial(kv_case, n=9, stored=_FP8, k_scale=0.25, v_scale=3.0),
}
