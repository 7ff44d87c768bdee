"""Query and key norms with rotary embedding by kernels_hip, in one launch.

Letters: T rows, H query heads, G key heads, D head size, P positions of the table, R half of the rotated dimensions.
"""

from __future__ import annotations

import torch

from rocm_serve.ops.contract import OpFunction
from rocm_serve.ops.hip_library import Library, aligned, check
from rocm_serve.ops.hip_provider import CHUNK

MAX_WIDTH = 256


def make_qk_norm_rope(library: Library) -> OpFunction:
    """Return the op's function."""

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
        """Shapes: q [T, H, D], k [T, G, D] bfloat16, cos and sin fp32 [P, R], positions int [T] -> q, k.

        Errors: ValueError for an R that is no multiple of 8. R = 0 turns nothing: the norms alone.
        """
        for x in (q_THD, k_TGD, q_weight_D, k_weight_D):
            check("qk_norm_rope", x, MAX_WIDTH)
        half = cos_PR.shape[1]
        if half % CHUNK:
            raise ValueError(
                f"qk_norm_rope by hip takes rotated dimensions in multiples of {2 * CHUNK}, not {2 * half}"
            )
        q, k = aligned(q_THD), aligned(k_TGD)
        weights = (aligned(q_weight_D), aligned(k_weight_D))
        turned = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k)]
        table = (aligned(cos_PR.contiguous()), aligned(sin_PR.contiguous()), positions_T.long().contiguous())
        sizes = (q.shape[0], q.shape[1], k.shape[1])
        strides = (q.stride(0), q.stride(1), k.stride(0), k.stride(1))
        tail = (*sizes, *strides, q.shape[2], half, eps)
        library.call("rs_qk_norm_rope", q, k, *weights, *turned, *table, *tail)
        return turned[0], turned[1]

    return qk_norm_rope
