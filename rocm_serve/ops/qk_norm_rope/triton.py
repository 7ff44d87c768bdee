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
    """Norm and turn the heads that begin at `x`, in fp32. Each element is read with its partner, R away; past 2 R it is
    its own."""
    d = tl.arange(0, BLOCK_D)
    partner = tl.where(d < R, d + R, tl.where(d < 2 * R, d - R, d))
    exists = d < D
    own = tl.load(x + d[None, :], mask=real, other=0.0).to(tl.float32)
    its = tl.load(x + partner[None, :], mask=real, other=0.0).to(tl.float32)
    own_weight = tl.load(weight + d, mask=exists, other=0.0).to(tl.float32) + 1.0
    its_weight = tl.load(weight + partner, mask=exists, other=0.0).to(tl.float32) + 1.0
    angle = tl.where(d < R, d, d - R)
    c = tl.load(cos + angle, mask=d < 2 * R, other=1.0)
    s = tl.load(sin + angle, mask=d < 2 * R, other=0.0)
    s = tl.where(d < R, -s, s)
    scale = tl.rsqrt(tl.sum(own * own, 1) / D + eps)[:, None]
    return own * scale * own_weight[None, :] * c[None, :] + its * scale * its_weight[None, :] * s[None, :]


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
    d = tl.arange(0, BLOCK_D)[None, :]
    if block < q_blocks:
        head = block * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
        real = (head < q_heads) & (d < D)
        y = turned(q + row * q_row + head * q_head, real, q_weight, cos + at, sin + at, eps, D, R, BLOCK_D)
        tl.store(q_out + (row * q_heads + head) * D + d, y.to(q_out.dtype.element_ty), mask=real)
    else:
        head = (block - q_blocks) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
        real = (head < k_heads) & (d < D)
        y = turned(k + row * k_row + head * k_head, real, k_weight, cos + at, sin + at, eps, D, R, BLOCK_D)
        tl.store(k_out + (row * k_heads + head) * D + d, y.to(k_out.dtype.element_ty), mask=real)


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
