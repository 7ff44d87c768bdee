"""Query and key norms with rotary embedding in Triton.

Letters: T rows, H query heads, G key heads, D head size, P positions of the table, R half of the rotated dimensions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_TILE = 1024  # elements: as many heads at a time as fit


@triton.jit
def turned(x, real, weight, cos, sin, eps, D: tl.constexpr, R: tl.constexpr, BLOCK_D: tl.constexpr):
    """Norm the heads that begin at `x`, [H, 1], and turn them; return them as they are but for the first 2 R, and the
    first and second R turned, [H, BLOCK_R] each.

    What turns is read once more: its partner stands in another lane.
    """
    BLOCK_R: tl.constexpr = triton.next_power_of_2(R)
    d, r = tl.arange(0, BLOCK_D)[None, :], tl.arange(0, BLOCK_R)[None, :]
    turns = real & (r < R)
    own = tl.load(x + d, mask=real & (d < D), other=0.0).to(tl.float32)
    a = tl.load(x + r, mask=turns, other=0.0).to(tl.float32)
    b = tl.load(x + R + r, mask=turns, other=0.0).to(tl.float32)
    c = tl.load(cos + r, mask=r < R, other=0.0)
    s = tl.load(sin + r, mask=r < R, other=0.0)
    weight_d = tl.load(weight + d, mask=d < D, other=0.0).to(tl.float32) + 1.0
    weight_a = tl.load(weight + r, mask=r < R, other=0.0).to(tl.float32) + 1.0
    weight_b = tl.load(weight + R + r, mask=r < R, other=0.0).to(tl.float32) + 1.0
    scale = tl.rsqrt(tl.sum(own * own, 1) / D + eps)[:, None]
    a, b = a * scale * weight_a, b * scale * weight_b
    return own * scale * weight_d, a * c - b * s, b * c + a * s


@triton.jit
def store_turned(to, real, own, a, b, D: tl.constexpr, R: tl.constexpr, BLOCK_D: tl.constexpr):
    """Write what `turned` returns, in the dtype of the heads that begin at `to`."""
    BLOCK_R: tl.constexpr = triton.next_power_of_2(R)
    d, r = tl.arange(0, BLOCK_D)[None, :], tl.arange(0, BLOCK_R)[None, :]
    dtype: tl.constexpr = to.dtype.element_ty
    tl.store(to + d, own.to(dtype), mask=real & (d >= 2 * R) & (d < D))
    tl.store(to + r, a.to(dtype), mask=real & (r < R))
    tl.store(to + R + r, b.to(dtype), mask=real & (r < R))


@triton.jit
def qk_norm_rope_kernel(
    q, k, q_weight, k_weight, cos, sin, positions, q_out, k_out, eps, q_heads, k_heads, q_row, q_head, k_row, k_head,
    D: tl.constexpr, R: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Some heads of one row: the blocks of query heads come first, then those of key heads."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    q_blocks = tl.cdiv(q_heads, BLOCK_H)
    at = tl.load(positions + row) * R
    if block < q_blocks:
        head = block * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
        real = head < q_heads
        own, a, b = turned(q + row * q_row + head * q_head, real, q_weight, cos + at, sin + at, eps, D, R, BLOCK_D)
        store_turned(q_out + (row * q_heads + head) * D, real, own, a, b, D, R, BLOCK_D)
    else:
        head = (block - q_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
        real = head < k_heads
        own, a, b = turned(k + row * k_row + head * k_head, real, k_weight, cos + at, sin + at, eps, D, R, BLOCK_D)
        store_turned(k_out + (row * k_heads + head) * D, real, own, a, b, D, R, BLOCK_D)


def qk_norm_rope(
    q_THD: torch.Tensor,
    k_TGD: torch.Tensor,
    q_weight_D: torch.Tensor,
    k_weight_D: torch.Tensor,
    cos_PR: torch.Tensor,
    sin_PR: torch.Tensor,
    positions_T: torch.Tensor,
    *,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalise every query and key head, then rotate their first 2 R dimensions: the reference's semantics.

    Rows and heads of q and k may lie apart (q beside its gate); the results are contiguous.
    Numerics: fp32 inside, one rounding at the end.
    """
    rows, q_heads, d = q_THD.shape
    k_heads, half = k_TGD.shape[1], cos_PR.shape[1]
    assert q_THD.stride(2) == 1 and k_TGD.stride(2) == 1, "the elements of a head lie one after the other"
    assert cos_PR.is_contiguous() and sin_PR.is_contiguous() and cos_PR.dtype == sin_PR.dtype == torch.float32
    q_out = torch.empty((rows, q_heads, d), dtype=q_THD.dtype, device=q_THD.device)
    k_out = torch.empty((rows, k_heads, d), dtype=k_TGD.dtype, device=k_TGD.device)
    if rows:
        block_d = triton.next_power_of_2(d)
        block_h = max(1, _TILE // block_d)
        qk_norm_rope_kernel[(rows, triton.cdiv(q_heads, block_h) + triton.cdiv(k_heads, block_h))](
            q_THD,
            k_TGD,
            q_weight_D,
            k_weight_D,
            cos_PR,
            sin_PR,
            positions_T,
            q_out,
            k_out,
            float(eps),
            q_heads,
            k_heads,
            q_THD.stride(0),
            q_THD.stride(1),
            k_TGD.stride(0),
            k_TGD.stride(1),
            D=d,
            R=half,
            BLOCK_D=block_d,
            BLOCK_H=block_h,
            num_warps=2,
        )
    return q_out, k_out
