"""The experts of many rows, in Triton: one program multiplies one tile of the rows of one expert.

Letters: T rows, H width, I expert width, E experts, k choices a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rocm_serve.ops.fp8 import BLOCK, fp8_max
from rocm_serve.ops.moe_experts.triton_order import Order, expert_of, sort_choices
from rocm_serve.ops.triton_common.triton import (
    arch,
    part_row_tile,
    product,
    product_tile,
    quantise_rows,
    quantise_tile,
)

_BLOCK = tl.constexpr(BLOCK)
_RETURNED_BYTES = 1 << 28  # what experts return, in float32 for every choice, is held for so many bytes of columns


def many_rows(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    ids_Tk: torch.Tensor,
    weights_Tk: torch.Tensor,
    num_rows: int | torch.Tensor,
    w13_EIH: torch.Tensor,
    w13_scale: torch.Tensor | None,
    w2_EHI: torch.Tensor,
    w2_scale: torch.Tensor | None,
    out_TH: torch.Tensor,
    *,
    quantised: bool,
    dot: tl.dtype,
) -> None:
    """Compute `moe_experts` into `out_TH`. `quantised`: rows are, or are to be, FP8."""
    experts = w13_EIH.shape[0]
    tile = product_tile(triton.cdiv(ids_Tk.numel(), experts), dot, arch())
    order = sort_choices(ids_Tk, num_rows, experts, tile["BM"])
    if quantised and x_scale is None:
        x, x_scale = quantise_rows(x, w13_EIH.dtype)
    hidden, hidden_scale = _gate_up(x, x_scale, order, w13_EIH, w13_scale, dot, tile)
    _down(hidden, hidden_scale, order, weights_Tk, num_rows, w2_EHI, w2_scale, dot, tile, out_TH)


def _gate_up(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    order: Order,
    w13_EIH: torch.Tensor,
    scale: torch.Tensor | None,
    dot: tl.dtype,
    tile: dict[str, int],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return silu(gate) * up of every choice [T k, I], and its multipliers when the rows have some."""
    width = w13_EIH.shape[1] // 2
    hidden_scale = None
    if x_scale is not None:
        hidden_scale = torch.empty(order.num_choices, triton.cdiv(width, BLOCK), dtype=torch.float32, device=x.device)
    hidden = torch.empty(order.num_choices, width, dtype=x.dtype, device=x.device)
    gate_up_kernel[(order.max_tiles, triton.cdiv(width, tile["BN"]))](
        x,
        x_scale,
        w13_EIH,
        scale,
        hidden,
        hidden_scale,
        order.choices,
        order.expert_of_tile,
        order.num_tiles,
        x.stride(0),
        order.num_choices,
        TOP_K=order.ids_Tk.shape[1],
        K=x.shape[1],
        WIDTH=width,
        TOP=fp8_max(x.dtype) if x_scale is not None else 0.0,
        DOT=dot,
        **tile,
    )
    return hidden, hidden_scale


def _down(
    hidden: torch.Tensor,
    hidden_scale: torch.Tensor | None,
    order: Order,
    weights_Tk: torch.Tensor,
    num_rows: int | torch.Tensor,
    w2_EHI: torch.Tensor,
    scale: torch.Tensor | None,
    dot: tl.dtype,
    tile: dict[str, int],
    out_TH: torch.Tensor,
) -> None:
    """Write the weighted sums of what the experts return, a panel of columns after the other."""
    experts, width, k = w2_EHI.shape
    panel = max(tile["BN"], _RETURNED_BYTES // (4 * order.num_choices) // tile["BN"] * tile["BN"])
    panel = min(panel, triton.cdiv(width, tile["BN"]) * tile["BN"])
    returned = torch.empty(order.num_choices, panel, dtype=torch.float32, device=out_TH.device)
    rows, top_k = order.ids_Tk.shape
    row_tile = part_row_tile(panel)
    for first in range(0, width, panel):
        columns = min(panel, width - first)
        down_kernel[(order.max_tiles, triton.cdiv(columns, tile["BN"]))](
            hidden,
            hidden_scale,
            w2_EHI,
            scale,
            returned,
            order.choices,
            order.expert_of_tile,
            order.num_tiles,
            order.num_choices,
            first,
            K=k,
            WIDTH=width,
            PANEL=panel,
            DOT=dot,
            **tile,
        )
        combine_kernel[(triton.cdiv(rows, row_tile["ROWS"]), triton.cdiv(columns, row_tile["BLOCK"]))](
            returned,
            order.ids_Tk,
            weights_Tk,
            num_rows,
            out_TH,
            rows,
            first,
            WIDTH=width,
            PANEL=panel,
            TOP_K=top_k,
            EXPERTS=experts,
            ROWS_ON_DEVICE=isinstance(num_rows, torch.Tensor),
            **row_tile,
        )


@triton.jit(do_not_specialize=["num_choices"])
def gate_up_kernel(
    x_ptr,
    x_scale_ptr,
    w_ptr,
    w_scale_ptr,
    hidden_ptr,
    hidden_scale_ptr,
    choices_ptr,
    expert_of_tile_ptr,
    num_tiles_ptr,
    x_stride,
    num_choices,
    TOP_K: tl.constexpr,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    TOP: tl.constexpr,
    DOT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    tile = tl.program_id(0)
    if tile >= tl.load(num_tiles_ptr):
        return
    expert = tl.load(expert_of_tile_ptr + tile).to(tl.int64)
    choice = tl.load(choices_ptr + tile * BM + tl.arange(0, BM))
    live = choice < num_choices
    row = (choice // TOP_K).to(tl.int64)
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    column_live = column < WIDTH
    scales: tl.constexpr = (K + _BLOCK - 1) // _BLOCK
    scale_rows: tl.constexpr = (2 * WIDTH + _BLOCK - 1) // _BLOCK
    x_scales = None
    gate_scales = None
    up_scales = None
    if x_scale_ptr is not None:
        x_scales = x_scale_ptr + row * scales
    if w_scale_ptr is not None:
        w_scales = w_scale_ptr + expert * (scale_rows * scales)
        gate_scales = w_scales + column // _BLOCK * scales
        up_scales = w_scales + (column + WIDTH) // _BLOCK * scales
    x_rows = x_ptr + row * x_stride
    gate_rows = w_ptr + (expert * (2 * WIDTH) + column) * K
    gate = product(x_rows, live, x_scales, gate_rows, column_live, gate_scales, K, BM, BN, BK, DOT)
    up = product(x_rows, live, x_scales, gate_rows + WIDTH * K, column_live, up_scales, K, BM, BN, BK, DOT)
    hidden = gate * tl.sigmoid(gate) * up
    at = choice.to(tl.int64)
    stored = live[:, None] & column_live[None, :]
    if hidden_scale_ptr is not None:
        hidden, scale = quantise_tile(hidden, TOP, hidden_ptr.dtype.element_ty)
        blocks: tl.constexpr = (WIDTH + _BLOCK - 1) // _BLOCK
        tl.store(hidden_scale_ptr + at * blocks + tl.program_id(1), scale, mask=live)
    tl.store(hidden_ptr + (at * WIDTH)[:, None] + column[None, :], hidden.to(hidden_ptr.dtype.element_ty), mask=stored)


@triton.jit(do_not_specialize=["num_choices"])
def down_kernel(
    hidden_ptr,
    hidden_scale_ptr,
    w_ptr,
    w_scale_ptr,
    returned_ptr,
    choices_ptr,
    expert_of_tile_ptr,
    num_tiles_ptr,
    num_choices,
    first_column,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    PANEL: tl.constexpr,
    DOT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    tile = tl.program_id(0)
    if tile >= tl.load(num_tiles_ptr):
        return
    expert = tl.load(expert_of_tile_ptr + tile).to(tl.int64)
    choice = tl.load(choices_ptr + tile * BM + tl.arange(0, BM))
    live = choice < num_choices
    at = choice.to(tl.int64)
    in_panel = tl.program_id(1) * BN + tl.arange(0, BN)
    column = first_column + in_panel
    column_live = column < WIDTH
    scales: tl.constexpr = (K + _BLOCK - 1) // _BLOCK
    scale_rows: tl.constexpr = (WIDTH + _BLOCK - 1) // _BLOCK
    hidden_scales = None
    w_scales = None
    if hidden_scale_ptr is not None:
        hidden_scales = hidden_scale_ptr + at * scales
    if w_scale_ptr is not None:
        w_scales = w_scale_ptr + expert * (scale_rows * scales) + column // _BLOCK * scales
    w_rows = w_ptr + (expert * WIDTH + column) * K
    y = product(hidden_ptr + at * K, live, hidden_scales, w_rows, column_live, w_scales, K, BM, BN, BK, DOT)
    tl.store(returned_ptr + (at * PANEL)[:, None] + in_panel[None, :], y, mask=live[:, None] & column_live[None, :])


@triton.jit(do_not_specialize=["num_rows", "all_rows"])
def combine_kernel(
    returned_ptr,
    ids_ptr,
    weights_ptr,
    num_rows,
    out_ptr,
    all_rows,
    first_column,
    WIDTH: tl.constexpr,
    PANEL: tl.constexpr,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS_ON_DEVICE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    in_panel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column = first_column + in_panel
    inside = (in_panel < PANEL) & (column < WIDTH)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for j in range(TOP_K):
        choice = row * TOP_K + j
        expert = expert_of(ids_ptr, choice, all_rows * TOP_K, num_rows, TOP_K, ROWS_ON_DEVICE)
        held = (expert >= 0) & (expert < EXPERTS)
        weight = tl.load(weights_ptr + choice, mask=held, other=0.0)
        at = returned_ptr + (choice.to(tl.int64) * PANEL)[:, None] + in_panel[None, :]
        total += tl.load(at, mask=held[:, None] & inside[None, :], other=0.0) * weight[:, None]
    out_at = out_ptr + (row.to(tl.int64) * WIDTH)[:, None] + column[None, :]
    tl.store(out_at, total.to(out_ptr.dtype.element_ty), mask=(row < all_rows)[:, None] & inside[None, :])
