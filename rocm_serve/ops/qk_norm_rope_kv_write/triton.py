"""Query and key norms, rotary embedding and the write of keys and values in Triton, in one launch.

Letters: T rows, N of them real, C columns of the projection, H query heads, G key/value heads, D head size,
P pages of S rows (of the table of angles: P positions), R half of the rotated dimensions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rocm_serve.ops.fp8 import fp8_max
from rocm_serve.ops.kv_write.triton import stored
from rocm_serve.ops.qk_norm_rope.triton import store_turned, turned
from rocm_serve.ops.tiles_rows import qk_norm_rope_kv_write_tile
from rocm_serve.ops.triton_common.triton import begin, blocks, following


@triton.jit(do_not_specialize=["rows", "indices"])
def qk_norm_rope_kv_write_kernel(
    qkv, q_weight, k_weight, cos, sin, positions, q_out, k_pages, v_pages, index,
    eps, k_scale, v_scale, qkv_row, rows, indices,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, R: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr, K_TOP: tl.constexpr, V_TOP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Some heads, one after the other, of one row or several: first those of queries, then of keys, then of values."""
    begin(PDL)
    q_blocks, kv_blocks = tl.cdiv(rows * HEADS, BLOCK_H), tl.cdiv(rows * KV_HEADS, BLOCK_H)
    block = tl.program_id(0)
    if block < q_blocks:
        item = block * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
        row = (item // HEADS).to(tl.int64)
        real = row < rows
        at = tl.load(positions + row, mask=real, other=0) * R
        x = qkv + row * qkv_row + item % HEADS * (2 * D)
        own, a, b = turned(x, real, q_weight, cos + at, sin + at, eps, D, R, BLOCK_D)
        store_turned(q_out + item.to(tl.int64) * D, real, own, a, b, D, R, BLOCK_D)
    else:
        is_key = block < q_blocks + kv_blocks
        item = (block - q_blocks - tl.where(is_key, 0, kv_blocks)) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
        row = (item // KV_HEADS).to(tl.int64)
        place = tl.load(index + row, mask=row < indices, other=-1)
        real = place >= 0
        to = (place * KV_HEADS + item % KV_HEADS) * D
        x = qkv + row * qkv_row + (2 * HEADS + item % KV_HEADS) * D
        if is_key:
            at = tl.load(positions + row, mask=real, other=0) * R
            own, a, b = turned(x, row < indices, k_weight, cos + at, sin + at, eps, D, R, BLOCK_D)
            held: tl.constexpr = k_pages.dtype.element_ty
            own = stored(own.to(qkv.dtype.element_ty).to(tl.float32), k_scale, held, K_TOP)
            a = stored(a.to(qkv.dtype.element_ty).to(tl.float32), k_scale, held, K_TOP)
            b = stored(b.to(qkv.dtype.element_ty).to(tl.float32), k_scale, held, K_TOP)
            store_turned(k_pages + to, real, own, a, b, D, R, BLOCK_D)
        else:
            d = tl.arange(0, BLOCK_D)[None, :]
            v = tl.load(x + KV_HEADS * D + d, mask=(row < indices) & (d < D), other=0.0).to(tl.float32)
            tl.store(v_pages + to + d, stored(v, v_scale, v_pages.dtype.element_ty, V_TOP), mask=real & (d < D))


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
    """Return the normed and turned queries and write keys and values into the pages: the reference's semantics.

    Numerics: bit for bit those of qk_norm_rope and kv_write in Triton.
    """
    kv_heads, d = k_pages_PSGD.shape[2:]
    rows, heads = qkv_TC.shape[0], qkv_TC.shape[1] // (2 * d) - kv_heads
    assert qkv_TC.shape[1] == 2 * (heads + kv_heads) * d and qkv_TC.stride(1) == 1, (
        f"{qkv_TC.shape} for {kv_heads} x {d}"
    )
    assert cos_PR.is_contiguous() and sin_PR.is_contiguous() and cos_PR.dtype == sin_PR.dtype == torch.float32
    tops = []
    for pages, scale in ((k_pages_PSGD, k_scale), (v_pages_PSGD, v_scale)):
        assert pages.is_contiguous() and pages.shape[2:] == (kv_heads, d), f"pages {pages.shape}"
        narrow = pages.dtype.itemsize == 1
        assert narrow or scale == 1.0, f"scale {scale} for {pages.dtype} pages"
        tops.append(fp8_max(pages.dtype) if narrow else 0.0)
    q_THD = torch.empty((rows, heads, d), dtype=qkv_TC.dtype, device=qkv_TC.device)
    if rows:
        tile = qk_norm_rope_kv_write_tile(rows)
        some = tile["BLOCK_H"]
        qk_norm_rope_kv_write_kernel[(blocks(rows * heads, some) + 2 * blocks(rows * kv_heads, some),)](
            *(qkv_TC, q_weight_D, k_weight_D, cos_PR, sin_PR, positions_T, q_THD, k_pages_PSGD, v_pages_PSGD, index_N),
            *(float(eps), float(k_scale), float(v_scale), qkv_TC.stride(0), rows, index_N.shape[0]),
            **{"HEADS": heads, "KV_HEADS": kv_heads, "D": d, "R": cos_PR.shape[1]},
            BLOCK_D=triton.next_power_of_2(d),
            K_TOP=tops[0],
            V_TOP=tops[1],
            **tile,
            **following(),
        )
    return q_THD
