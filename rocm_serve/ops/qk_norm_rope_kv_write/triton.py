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
from rocm_serve.ops.qk_norm_rope.triton import turned
from rocm_serve.ops.triton_common.triton import begin, following

_FEW_ROWS = 512  # above them a program has four heads, not two: 8 numbers a lane of 64, 16 of 32


@triton.jit(do_not_specialize=["heads", "kv_heads", "indices"])
def qk_norm_rope_kv_write_kernel(
    qkv, q_weight, k_weight, cos, sin, positions, q_out, k_pages, v_pages, index,
    eps, k_scale, v_scale, qkv_row, heads, kv_heads, indices,
    D: tl.constexpr, R: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr,
    K_TOP: tl.constexpr, V_TOP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Some heads of one row: blocks of query heads come first, then those of keys, then those of values."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    q_blocks, kv_blocks = tl.cdiv(heads, BLOCK_H), tl.cdiv(kv_heads, BLOCK_H)
    x = qkv + row * qkv_row
    at = tl.load(positions + row) * R
    d = tl.arange(0, BLOCK_D)[None, :]
    if block < q_blocks:
        head = block * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
        real = (head < heads) & (d < D)
        y = turned(x + head * 2 * D, real, q_weight, cos + at, sin + at, eps, D, R, BLOCK_D)
        tl.store(q_out + (row * heads + head) * D + d, y.to(q_out.dtype.element_ty), mask=real)
    else:
        place = tl.load(index + row, mask=row < indices, other=-1)
        x += heads * 2 * D
        is_key = block < q_blocks + kv_blocks
        head = (block - q_blocks - tl.where(is_key, 0, kv_blocks)) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
        real = (head < tl.where(place >= 0, kv_heads, 0)) & (d < D)
        to = (place * kv_heads + head) * D + d
        if is_key:
            y = turned(x + head * D, real, k_weight, cos + at, sin + at, eps, D, R, BLOCK_D)
            y = y.to(qkv.dtype.element_ty).to(tl.float32)
            tl.store(k_pages + to, stored(y, k_scale, k_pages.dtype.element_ty, K_TOP), mask=real)
        else:
            v = tl.load(x + (kv_heads + head) * D + d, mask=real, other=0.0).to(tl.float32)
            tl.store(v_pages + to, stored(v, v_scale, v_pages.dtype.element_ty, V_TOP), mask=real)


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
        some = 2 if rows <= _FEW_ROWS else 4
        qk_norm_rope_kv_write_kernel[(rows, triton.cdiv(heads, some) + 2 * triton.cdiv(kv_heads, some))](
            *(qkv_TC, q_weight_D, k_weight_D, cos_PR, sin_PR, positions_T, q_THD, k_pages_PSGD, v_pages_PSGD, index_N),
            *(float(eps), float(k_scale), float(v_scale), qkv_TC.stride(0), heads, kv_heads, index_N.shape[0]),
            **{"D": d, "R": cos_PR.shape[1], "BLOCK_D": triton.next_power_of_2(d), "BLOCK_H": some},
            K_TOP=tops[0],
            V_TOP=tops[1],
            num_warps=some // 2,
            **following(),
        )
    return q_THD
