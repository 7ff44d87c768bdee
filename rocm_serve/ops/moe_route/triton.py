"""The router's choice of experts, in Triton. Letters: T rows, E experts, k chosen ones."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rocm_serve.ops.tiles import tile
from rocm_serve.ops.triton_common.triton import arch, following, let_next_begin, rows_of, wait_for_previous


def moe_route(logits_TE: torch.Tensor, *, top_k: int, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the `top_k` most probable experts of each row.

    Shapes: logits [T, E] -> ids int32 [T, k], best first, and weights fp32 [T, k].
    `renormalise`: weights of a row sum to 1. Of equal probabilities the lower id is taken. A row with a NaN gets
    weights of NaN and legal ids, so that it is seen downstream.
    """
    logits = rows_of(logits_TE)
    rows, experts = logits.shape
    ids_Tk = torch.empty(rows, top_k, dtype=torch.int32, device=logits.device)
    weights_Tk = torch.empty(rows, top_k, dtype=torch.float32, device=logits.device)
    if ids_Tk.numel():
        block = triton.next_power_of_2(experts)
        moe_route_kernel[(rows,)](
            logits,
            ids_Tk,
            weights_Tk,
            logits.stride(0),
            EXPERTS=experts,
            TOP_K=top_k,
            RENORMALISE=renormalise,
            BLOCK=block,
            BLOCK_K=triton.next_power_of_2(top_k),
            EARLY=bool(tile("moe_route", {"rows": rows, "k": top_k, "e": experts}, arch())["EARLY"]),
            num_warps=max(1, min(8, block // 512)),
            **following(),
        )
    return ids_Tk, weights_Tk


@triton.jit
def moe_route_kernel(
    logits_ptr,
    ids_ptr,
    weights_ptr,
    logits_stride,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    RENORMALISE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row. EARLY: the next kernel may begin at once."""
    wait_for_previous(PDL)
    let_next_begin(PDL and EARLY)
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    place = tl.arange(0, BLOCK_K)
    x = tl.load(logits_ptr + row * logits_stride + expert, mask=expert < EXPERTS, other=float("-inf")).to(tl.float32)
    grown = tl.where(expert < EXPERTS, tl.exp(x - tl.max(x, 0)), 0.0)
    mass = tl.sum(grown, 0)
    left = tl.where(expert < EXPERTS, grown / mass, -1.0)
    ids = tl.zeros((BLOCK_K,), tl.int32)
    weights = tl.zeros((BLOCK_K,), tl.float32)
    total = tl.sum(weights, 0)
    for j in range(TOP_K):
        best = tl.max(left, 0)
        chosen = tl.minimum(tl.min(tl.where(left == best, expert, BLOCK), 0), EXPERTS - 1)
        ids = tl.where(place == j, chosen, ids)
        weights = tl.where(place == j, best, weights)
        total += best
        left = tl.where(expert == chosen, -1.0, left)
    if RENORMALISE:
        weights = weights / total
    weights = tl.where(mass == mass, weights, mass)  # a NaN among the logits makes their sum one
    let_next_begin(PDL and not EARLY)
    tl.store(ids_ptr + row * TOP_K + place, ids, mask=place < TOP_K)
    tl.store(weights_ptr + row * TOP_K + place, weights, mask=place < TOP_K)
