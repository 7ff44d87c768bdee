"""Products of FP8 numbers as sm_90's matrix instructions sum them, in fewer bits than fp32 has."""

from __future__ import annotations

import torch

from rocm_serve.ops.fp8 import BLOCK, quantise_rows, widened
from rocm_serve.ops.moe_experts.reference import Multiply

AT_ONCE = 32  # products that one instruction adds to a sum


def short_sums(bits: int) -> Multiply:
    """Return `multiply_1x128` with sums that keep `bits` bits after the leading one of their largest term."""

    def multiply(x_TK: torch.Tensor, w_NK: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        q_TK, s_TB = quantise_rows(x_TK, w_NK.dtype)
        total = torch.zeros(len(x_TK), len(w_NK), dtype=torch.float32)
        for b, (q, w) in enumerate(zip(q_TK.split(BLOCK, 1), w_NK.split(BLOCK, 1), strict=True)):
            wide = scale[:, b].repeat_interleave(BLOCK)[: len(w_NK)]
            total += _block(widened(q), widened(w), bits) * s_TB[:, b, None] * wide
        return total

    return multiply


def _block(q_TK: torch.Tensor, w_NK: torch.Tensor, bits: int) -> torch.Tensor:
    """Multiply the columns of one block. What is cut off leaves numbers that fp32 adds without error."""
    total = torch.zeros(len(q_TK), len(w_NK))
    for q, w in zip(q_TK.split(AT_ONCE, 1), w_NK.split(AT_ONCE, 1), strict=True):
        terms = torch.cat([q[:, None] * w[None], total[..., None]], -1)
        lead = terms.abs().amax(-1, keepdim=True).frexp().exponent - 1
        unit = torch.exp2((lead - bits).float())
        total = (terms / unit).trunc_().mul_(unit).sum(-1)
    return total
