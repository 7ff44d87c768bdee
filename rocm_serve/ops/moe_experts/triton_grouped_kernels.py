"""Kernels of the experts of many rows: the way up, and the sum at the end; see triton_grouped.py.

Letters: T rows, k choices a row, K columns of a product. In kernels: BM choices of a tile, BN rows of a weight, BK
columns of both at a time; `w`: see triton_grouped_tiles.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rocm_serve.ops.fp8 import BLOCK
from rocm_serve.ops.moe_experts.triton_grouped_tiles import (
    add_block,
    codes_of,
    half_empty,
    largest_of,
    multiplier_of,
    multipliers,
    row_scales,
    rows_tile,
    scales_of,
    store_columns,
    weights_tile,
    work_of,
)
from rocm_serve.ops.moe_experts.triton_order import expert_of

_BLOCK = tl.constexpr(BLOCK)


@triton.jit
def store_hidden(
    hidden, hidden_far, row, live, first, hidden_ptr, hidden_scale_ptr,
    WIDTH: tl.constexpr, TOP: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """Store columns from `first` on, with HALVES as many of `hidden_far` after them; FP8 where rows have scales."""
    dtype: tl.constexpr = hidden_ptr.dtype.element_ty
    part: tl.constexpr = hidden.shape[1]
    column = first + tl.arange(0, part)
    if hidden_scale_ptr is not None:
        hidden = tl.where((column < WIDTH)[None, :], hidden, 0.0)
        largest = largest_of(hidden)
        if HALVES:
            hidden_far = tl.where((column + part < WIDTH)[None, :], hidden_far, 0.0)
            largest = tl.maximum(largest, largest_of(hidden_far))
        scale, inverse = multiplier_of(largest, TOP)
        tl.store(hidden_scale_ptr + row * ((WIDTH + _BLOCK - 1) // _BLOCK) + first // _BLOCK, scale, mask=live)
        store_columns(hidden_ptr, codes_of(hidden, scale, inverse, TOP, dtype), row, live, column, WIDTH)
        if HALVES:
            codes = codes_of(hidden_far, scale, inverse, TOP, dtype)
            store_columns(hidden_ptr, codes, row, live, column + part, WIDTH)
    else:
        store_columns(hidden_ptr, hidden.to(dtype), row, live, column, WIDTH)
        if HALVES:
            store_columns(hidden_ptr, hidden_far.to(dtype), row, live, column + part, WIDTH)


@triton.jit
def gate_up_tile(
    x_ptr, x_scale_ptr, w, w_scale_ptr, hidden_ptr, hidden_scale_ptr, choices_ptr, first_place, expert, first,
    x_stride, num_choices,
    TOP_K: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, TOP: tl.constexpr, DOT: tl.constexpr,
    DESC: tl.constexpr, HALVES: tl.constexpr, TILED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    choice = tl.load(choices_ptr + tl.arange(0, BM))
    live = choice < num_choices
    row = tl.where(live, choice // TOP_K, 0).to(tl.int64)  # a place without a choice reads a row and stores nothing
    x_rows = x_ptr + row * x_stride
    one_scale: tl.constexpr = WIDTH // _BLOCK * _BLOCK == WIDTH
    half: tl.constexpr = BN // 2
    part: tl.constexpr = half if HALVES else BN  # rows of a weight that are multiplied at once
    near = tl.minimum(first + tl.arange(0, part), WIDTH - 1) - first
    far = tl.minimum(first + half + tl.arange(0, part), WIDTH - 1) - first - half
    x_scales = row_scales(x_scale_ptr, row, K)
    gate_scales = scales_of(w_scale_ptr, expert, first, near, 2 * WIDTH, K, one_scale)
    up_scales = scales_of(w_scale_ptr, expert, first + WIDTH, near, 2 * WIDTH, K, one_scale)
    gate_far_scales = scales_of(w_scale_ptr, expert, first + half, far, 2 * WIDTH, K, one_scale)
    up_far_scales = scales_of(w_scale_ptr, expert, first + half + WIDTH, far, 2 * WIDTH, K, one_scale)
    first_row = expert * (2 * WIDTH) + first
    gate = tl.zeros((BM, part), tl.float32)
    up, gate_far, up_far = gate, gate, gate
    for k in range(0, K, BK):
        block = k // _BLOCK
        x = rows_tile(x_rows, k, K, BK)
        x_scale = multipliers(x_scales, block)
        w_tile = weights_tile(w, first_row, near, k, K, BK, DESC)
        gate = add_block(gate, x, w_tile, x_scale, gate_scales, block, DOT, one_scale)
        w_tile = weights_tile(w, first_row + WIDTH, near, k, K, BK, DESC)
        up = add_block(up, x, w_tile, x_scale, up_scales, block, DOT, one_scale)
        if HALVES:
            w_tile = weights_tile(w, first_row + half, far, k, K, BK, DESC)
            gate_far = add_block(gate_far, x, w_tile, x_scale, gate_far_scales, block, DOT, one_scale)
            w_tile = weights_tile(w, first_row + WIDTH + half, far, k, K, BK, DESC)
            up_far = add_block(up_far, x, w_tile, x_scale, up_far_scales, block, DOT, one_scale)
    hidden = gate * tl.sigmoid(gate) * up
    hidden_far = hidden
    if HALVES:
        hidden_far = gate_far * tl.sigmoid(gate_far) * up_far
    at = choice.to(tl.int64)
    if TILED:
        at = first_place + tl.arange(0, BM)
    store_hidden(hidden, hidden_far, at, live, first, hidden_ptr, hidden_scale_ptr, WIDTH, TOP, HALVES)


@triton.jit(do_not_specialize=["num_choices"])
def gate_up_kernel(
    x_ptr, x_scale_ptr, w, w_scale_ptr, hidden_ptr, hidden_scale_ptr, choices_ptr, expert_of_tile_ptr,
    num_tiles_ptr, x_stride, num_choices,
    TOP_K: tl.constexpr, K: tl.constexpr, WIDTH: tl.constexpr, TOP: tl.constexpr, DOT: tl.constexpr,
    DESC: tl.constexpr, HALVES: tl.constexpr, TILED: tl.constexpr, SHORT: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Multiply the rows of a tile with BN rows of gate and BN of up, and quantise what they make.

    HALVES: with half as many at a time, which takes half the registers for sums of 128 columns.

    SHORT: a tile that is at most half full is multiplied as half a tile.

    TILED: what they make lies in the order of the tiles, BM rows for each, and not in that of the choices.
    """
    blocks: tl.constexpr = (WIDTH + BN - 1) // BN
    tile, expert, block = work_of(expert_of_tile_ptr, num_tiles_ptr, blocks)
    if expert < 0:
        return
    half = half_empty(choices_ptr + tile * BM, num_choices, SHORT, BM)
    for parts in tl.static_range(1, SHORT + 2):
        if half == parts - 1:
            gate_up_tile(
                x_ptr,
                x_scale_ptr,
                w,
                w_scale_ptr,
                hidden_ptr,
                hidden_scale_ptr,
                choices_ptr + tile * BM,
                tile.to(tl.int64) * BM,
                expert,
                block * BN,
                x_stride,
                num_choices,
                TOP_K,
                K,
                WIDTH,
                TOP,
                DOT,
                DESC,
                HALVES,
                TILED,
                BM // parts,
                BN,
                BK,
            )


@triton.jit(do_not_specialize=["num_rows", "num_choices"])
def combine_kernel(
    returned_ptr, ids_ptr, weights_ptr, num_rows, out_ptr, num_choices, first_column,
    WIDTH: tl.constexpr, PANEL: tl.constexpr, TOP_K: tl.constexpr, EXPERTS: tl.constexpr,
    ROWS_ON_DEVICE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum what the experts of a row returned, weighted, in the order of its choices."""
    row = tl.program_id(0)
    in_panel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column = first_column + in_panel
    columns = tl.minimum(PANEL, WIDTH - first_column)
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(TOP_K):
        choice = row * TOP_K + j
        expert = expert_of(ids_ptr, choice, num_choices, num_rows, TOP_K, ROWS_ON_DEVICE)
        held = (expert >= 0) & (expert < EXPERTS)
        weight = tl.load(weights_ptr + choice, mask=held, other=0.0)
        at = returned_ptr + choice.to(tl.int64) * PANEL + in_panel
        total += tl.load(at, mask=in_panel < tl.where(held, columns, 0), other=0.0).to(tl.float32) * weight
    out_at = out_ptr + row.to(tl.int64) * WIDTH + column
    tl.store(out_at, total.to(out_ptr.dtype.element_ty), mask=in_panel < columns)
