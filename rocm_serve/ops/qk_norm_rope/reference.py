"""Query and key norms with rotary embedding.

Letters: T rows, H query heads, G key heads, D head size, P positions of the table, R half of the rotated dimensions.
"""

from __future__ import annotations

import torch

from rocm_serve.ops.rms_norm.reference import rms_norm


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
    """Normalise every query and key head (weights are 1 + w), then rotate their first 2 R dimensions.

    Shapes: q [T, H, D], k [T, G, D], cos and sin fp32 [P, R], positions int [T] -> q, k.
    Numerics: fp32 inside, one rounding at the end.
    Source: rotate-half: (a, b) = (x[:R], x[R:2R]) -> (a cos - b sin, b cos + a sin); dimensions from 2 R on pass.
    """
    cos_T1R, sin_T1R = cos_PR[positions_T][:, None], sin_PR[positions_T][:, None]
    turned = []
    for x, weight in ((q_THD, q_weight_D), (k_TGD, k_weight_D)):
        normed = rms_norm(x.float(), weight, eps=eps, plus_one=True)
        half = cos_PR.shape[1]
        a, b, rest = normed.split([half, half, x.shape[-1] - 2 * half], dim=-1)
        pieces = (a * cos_T1R - b * sin_T1R, b * cos_T1R + a * sin_T1R, rest)
        turned.append(torch.cat(pieces, dim=-1).to(x.dtype))
    return turned[0], turned[1]
