"""kv_write in Triton. Letters: N rows, G key/value heads, D head size, P pages, S rows of a page."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rocm_serve.ops.fp8 import fp8_max
from rocm_serve.ops.tiles_rows import kv_write_tile
from rocm_serve.ops.triton_common.triton import blocks


@triton.jit
def stored(x, scale, dtype: tl.constexpr, TOP: tl.constexpr):
    """Return x as the pages hold it. TOP: the largest magnitude of FP8 pages, 0 for float pages.

    A comparison with NaN is false, so NaN stays NaN, as torch's clamp has it.
    """
    if TOP > 0:
        x = tl.div_rn(x, scale)
        x = tl.where(x > TOP, TOP, tl.where(x < -TOP, -TOP, x))
    return x.to(dtype)


@triton.jit(do_not_specialize=["index", "num_rows"])
def kv_write_kernel(
    k, v, k_pages, v_pages, index, k_scale, v_scale, k_row, v_row, num_rows,
    WIDTH: tl.constexpr, K_TOP: tl.constexpr, V_TOP: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Some rows of K and of V; those of negative places stay unwritten. `*_TOP`: see `stored`.

    All is asked for at once: rows without a place are read for nothing.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (row < num_rows)[:, None] & (column < WIDTH)
    from_row = row.to(tl.int64)[:, None]
    place = tl.load(index + row, mask=row < num_rows, other=-1)
    of_k = tl.load(k + from_row * k_row + column, mask=inside, other=0.0).to(tl.float32)
    of_v = tl.load(v + from_row * v_row + column, mask=inside, other=0.0).to(tl.float32)
    real = (place >= 0)[:, None] & inside
    to = place[:, None] * WIDTH + column
    tl.store(k_pages + to, stored(of_k, k_scale, k_pages.dtype.element_ty, K_TOP), mask=real)
    tl.store(v_pages + to, stored(of_v, v_scale, v_pages.dtype.element_ty, V_TOP), mask=real)


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
    """Write each row into its place of the pages, in place: the reference's semantics.

    A row's heads lie one after the other; rows may be apart (a slice of a wider projection).
    Numerics: FP8 pages hold the correctly rounded quotient, as torch's division has it.
    """
    rows, kv_heads, d = k_NGD.shape
    width = kv_heads * d
    tops = []
    for x, pages, scale in ((k_NGD, k_pages_PSGD, k_scale), (v_NGD, v_pages_PSGD, v_scale)):
        assert pages.is_contiguous() and pages.shape[2:] == x.shape[1:], f"pages {pages.shape} for rows {x.shape}"
        assert x.stride(2) == 1 and (kv_heads == 1 or x.stride(1) == d), f"heads of a row lie apart: {x.stride()}"
        narrow = pages.dtype.itemsize == 1
        assert narrow or scale == 1.0, f"scale {scale} for {pages.dtype} pages"
        tops.append(fp8_max(pages.dtype) if narrow else 0.0)
    if rows:
        tile = kv_write_tile(width)
        kv_write_kernel[(blocks(rows, tile["ROWS"]), blocks(width, tile["BLOCK"]))](
            k_NGD,
            v_NGD,
            k_pages_PSGD,
            v_pages_PSGD,
            index_N,
            float(k_scale),
            float(v_scale),
            k_NGD.stride(0),
            v_NGD.stride(0),
            rows,
            WIDTH=width,
            K_TOP=tops[0],
            V_TOP=tops[1],
            **tile,
        )
    return k_pages_PSGD
