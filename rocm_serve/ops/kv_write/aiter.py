"""Store keys and values by AITER. Letters: N rows, G key/value heads, D head size, P pages, S rows of a page."""

from __future__ import annotations

import torch
from aiter.ops.cache import reshape_and_cache_flash

from rocm_serve.ops.fp8 import fp8_max


def kv_write(
    k_NGD: torch.Tensor,
    v_NGD: torch.Tensor,
    k_pages_PSGD: torch.Tensor,
    v_pages_PSGD: torch.Tensor,
    index_N: torch.Tensor,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    """Write each row into its place of the pages, in place; see the reference.

    AITER skips rows of negative places, as the reference does. Rows for FP8 pages are clamped before: how AITER's
    conversion treats larger ones differs between its builds.
    """
    if not k_NGD.shape[0]:
        return k_pages_PSGD
    kept = k_pages_PSGD.dtype.itemsize == 1
    assert kept or k_scale == v_scale == 1.0, f"scales {k_scale}, {v_scale} for {k_pages_PSGD.dtype} pages"
    assert kept or k_pages_PSGD.dtype == k_NGD.dtype, f"{k_NGD.dtype} rows for {k_pages_PSGD.dtype} pages"
    rows = []
    for x, scale in ((k_NGD, k_scale), (v_NGD, v_scale)):
        top = fp8_max(k_pages_PSGD.dtype) * scale if kept else None
        rows.append((x if top is None else x.clamp(-top, top)).contiguous())
    reshape_and_cache_flash(
        key=rows[0],
        value=rows[1],
        key_cache=k_pages_PSGD,
        value_cache=v_pages_PSGD,
        slot_mapping=index_N,
        kv_cache_dtype="fp8" if kept else "auto",
        k_scale=torch.full((1,), k_scale, dtype=torch.float32, device=k_NGD.device),
        v_scale=torch.full((1,), v_scale, dtype=torch.float32, device=k_NGD.device),
    )
    return k_pages_PSGD
