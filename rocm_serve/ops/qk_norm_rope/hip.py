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
    launch = library.entry("rs_qk_norm_rope")

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
        q_out, k_out = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k))
        table = (aligned(cos_PR.contiguous()), aligned(sin_PR.contiguous()), positions_T.long().contiguous())
        (tokens, q_heads, width), k_heads = q.shape, k.shape[1]
        (q_stride, q_head, _), (k_stride, k_head, _) = q.stride(), k.stride()
        sizes = (tokens, q_heads, k_heads, q_stride, q_head, k_stride, k_head, width, half)
        launch(q, k, *weights, q_out, k_out, *table, *sizes, eps)
        return q_out, k_out

    return qk_norm_rope
