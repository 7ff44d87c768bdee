"""Store keys and values. Letters: N rows, G key/value heads, D head size, P pages, S rows of a page."""

from __future__ import annotations

import torch

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
    """Write each row into its place of the pages, in place.

    Shapes: k, v [N, G, D], pages [P, S, G, D] of any float dtype, index int64 [N] = page * S + offset -> k pages.
    A row whose index is negative is written nowhere: the padded rows of a captured batch have -1.
    Numerics: float pages hold the value rounded; FP8 pages hold value / scale, clamped to the largest magnitude
    (a cast alone turns larger ones into NaN). Scales other than 1 are for FP8 pages only.
    """
    live = index_N >= 0
    if not live.all():
        k_NGD, v_NGD, index_N = k_NGD[live], v_NGD[live], index_N[live]
    for x, pages, scale in ((k_NGD, k_pages_PSGD, k_scale), (v_NGD, v_pages_PSGD, v_scale)):
        rows = pages.view(-1, *pages.shape[2:])
        if pages.dtype.itemsize == 1:
            top = fp8_max(pages.dtype)
            stored = (x.float() / scale).clamp(-top, top).to(pages.dtype)
            rows.view(torch.uint8)[index_N] = stored.view(torch.uint8)
        else:
            assert scale == 1.0, f"scale {scale} for {pages.dtype} pages"
            rows[index_N] = x.to(pages.dtype)
    return k_pages_PSGD
