"""The router's choice of experts. Letters: T rows, E experts, k chosen ones."""

from __future__ import annotations

import torch


def moe_route(logits_TE: torch.Tensor, *, top_k: int, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the `top_k` most probable experts of each row.

    Shapes: logits [T, E] -> ids int32 [T, k], best first, and weights fp32 [T, k].
    `renormalise`: weights of a row sum to 1. Of equal probabilities the lower id is taken.
    Source: softmax over all experts in fp32, then top-k, then w / sum(w) (Qwen3_5MoeTopKRouter).
    """
    probabilities_TE = logits_TE.float().softmax(-1)
    best = torch.sort(probabilities_TE, dim=-1, descending=True, stable=True)
    weights_Tk = best.values[:, :top_k]
    if renormalise:
        total_T = weights_Tk[:, 0].clone()
        for j in range(1, top_k):
            total_T += weights_Tk[:, j]
        weights_Tk = weights_Tk / total_T[:, None]
    return best.indices[:, :top_k].to(torch.int32), weights_Tk.contiguous()
