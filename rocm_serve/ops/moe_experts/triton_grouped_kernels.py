"""Kernels of the experts of many rows; see triton_grouped.py. Letters: T rows, k choices a row, K columns of a product.

In kernels: BM choices of a tile, BN rows of a weight, BK columns of both at a time. A weight is a pointer, or with DESC
a descriptor of all experts' rows one below the other, in tiles of [BN, BK], which the card's copy engine reads.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rocm_serve.ops.fp8 import AMAX_FLOOR, BLOCK
from rocm_serve.ops.moe_experts.triton_order import expert_of

_BLOCK = tl.constexpr(BLOCK)
_AMAX_FLOOR = tl.constexpr(AMAX_FLOOR)


@triton.jit
def divided(x, divisor, inverse):
    """Return the quotient as IEEE rounds it, by a product put right by what it leaves over; no subnormal numbers."""
    about = x * inverse
    return tl.fma(tl.fma(-about, divisor, x), inverse, about)


@triton.jit
def half_empty(choices_ptr, num_choices, SHORT: tl.constexpr, BM: tl.constexpr):
    """Return 1 for a tile that is at most half full, if that is asked for, else 0."""
    half = 0
    if SHORT:
        half = (tl.load(choices_ptr + BM // 2) >= num_choices).to(tl.int32)
    return half


@triton.jit
def largest_of(x):
    """Return the largest magnitude of each row, compared as integers: a NaN is the largest."""
    return tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)


@triton.jit
def multiplier_of(largest, TOP: tl.constexpr):
    """Return the multiplier of rows whose largest magnitude that is, and its reciprocal."""
    size = largest.to(tl.float32, bitcast=True)
    top = tl.full(size.shape, TOP, tl.float32)
    scale = divided(tl.where(size < _AMAX_FLOOR, _AMAX_FLOOR, size), top, 1.0 / TOP)
    inverse = 1.0 / scale
    return scale, tl.fma(tl.fma(-inverse, scale, tl.full(scale.shape, 1.0, tl.float32)), inverse, inverse)


@triton.jit
def codes_of(x, scale, inverse, TOP: tl.constexpr, dtype: tl.constexpr):
    """Quantise rows with their multipliers, as quantise_tile does, without its divisions.

    On NVIDIA an IEEE division is a call of a function, which takes registers from the whole kernel.
    """
    scaled = divided(x, tl.broadcast_to(scale[:, None], x.shape), tl.broadcast_to(inverse[:, None], x.shape))
    return tl.where(scaled > TOP, TOP, tl.where(scaled < -TOP, -TOP, scaled)).to(dtype)


@triton.jit
def rows_tile(rows, k, K: tl.constexpr, BK: tl.constexpr):
    """Read [rows, BK]. `rows` point to where each begins."""
    at = k + tl.arange(0, BK)
    if K % BK == 0:
        x = tl.load(rows[:, None] + at[None, :])
    else:
        x = tl.load(rows[:, None] + at[None, :], mask=(at < K)[None, :], other=0.0)
    return x


@triton.jit
def weights_tile(w, first, inside, k, K: tl.constexpr, BK: tl.constexpr, DESC: tl.constexpr):
    """Read [BK, BN] of the weight's rows `first + inside`."""
    if DESC:
        tile = w.load([first, k]).T
    else:
        at = tl.arange(0, BK)[:, None]
        tiles = w + first.to(tl.int64) * K + k + (inside[None, :] * K + at)
        if K % BK == 0:
            tile = tl.load(tiles)
        else:
            tile = tl.load(tiles, mask=k + at < K, other=0.0)
    return tile


@triton.jit
def scales_of(w_scale_ptr, expert, first, inside, ROWS: tl.constexpr, K: tl.constexpr, ONE_SCALE: tl.constexpr):
    """Point to the multipliers of the weight's rows `first + inside`, of ROWS for each expert; one for all, if so.

    None where a weight has none.
    """
    blocks: tl.constexpr = (K + _BLOCK - 1) // _BLOCK
    if w_scale_ptr is None:
        scales = None
    else:
        own = w_scale_ptr + expert.to(tl.int64) * ((ROWS + _BLOCK - 1) // _BLOCK * blocks)
        if ONE_SCALE:
            scales = own + first // _BLOCK * blocks
        else:
            scales = own + (first + inside) // _BLOCK * blocks
    return scales


@triton.jit
def row_scales(scale_ptr, row, K: tl.constexpr):
    """Point to the multipliers of rows; None where they have none."""
    if scale_ptr is None:
        scales = None
    else:
        scales = scale_ptr + row * ((K + _BLOCK - 1) // _BLOCK)
    return scales


@triton.jit
def add_block(total, x, w, x_scale, w_scales, block, DOT: tl.constexpr, ONE_SCALE: tl.constexpr):
    """Add the product of two tiles to [BM, BN]. Within 128 columns products are summed by themselves, then rescaled.

    `x_scale`: the multipliers of the rows of `x`, loaded, or None. `w_scales`: where those of the weight begin.
    """
    if w_scales is None:
        total = tl.dot(x.to(DOT), w.to(DOT), total, input_precision="ieee")
    else:
        w_scale = tl.load(w_scales + block)
        part = tl.dot(x.to(DOT), w.to(DOT), input_precision="ieee")
        if ONE_SCALE:
            if x_scale is None:
                total += part * w_scale
            else:
                total += part * (x_scale * w_scale)[:, None]
        else:
            part *= w_scale[None, :]
            if x_scale is not None:
                part *= x_scale[:, None]
            total += part
    return total


@triton.jit
def multipliers(scales, block):
    """Load the multipliers of rows; None where rows have none."""
    if scales is None:
        found = None
    else:
        found = tl.load(scales + block)
    return found


@triton.jit
def work_of(expert_of_tile_ptr, num_tiles_ptr, BLOCKS: tl.constexpr):
    """Return a program's tile, its expert (-1: no work) and which of BLOCKS it is: the blocks of a tile come together.

    So the rows of a tile, and the weights of an expert whose tiles follow each other, are read from the cache.
    """
    tile = tl.program_id(0) // BLOCKS
    expert = tl.load(expert_of_tile_ptr + tile, mask=tile < tl.load(num_tiles_ptr), other=-1)
    return tile, expert, tl.program_id(0) % BLOCKS


@triton.jit
def store_columns(out_ptr, values, row, live, column, WIDTH: tl.constexpr):
    tl.store(out_ptr + (row * WIDTH)[:, None] + column[None, :], values, mask=live[:, None] & (column < WIDTH)[None, :])


@triton.jit
def store_hidden(
    hidden,
    hidden_far,
    row,
    live,
    first,
    hidden_ptr,
    hidden_scale_ptr,
    WIDTH: tl.constexpr,
    TOP: tl.constexpr,
    HALVES: tl.constexpr,
):
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
    x_ptr,
    x_scale_ptr,
    w,
    w_scale_ptr,
    hidden_ptr,
    hidden_scale_ptr,
    choices_ptr,
    expert,
    first,
    x_stride,
    num_choices,
    TOP_K: tl.constexpr,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    TOP: tl.constexpr,
    DOT: tl.constexpr,
    DESC: tl.constexpr,
    HALVES: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
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
    store_hidden(hidden, hidden_far, at, live, first, hidden_ptr, hidden_scale_ptr, WIDTH, TOP, HALVES)


@triton.jit(do_not_specialize=["num_choices"])
def gate_up_kernel(
    x_ptr,
    x_scale_ptr,
    w,
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
    DESC: tl.constexpr,
    HALVES: tl.constexpr,
    SHORT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Multiply the rows of a tile with BN rows of gate and BN of up, and quantise what they make.

    HALVES: with half as many at a time, which takes half the registers for sums of 128 columns.

    SHORT: a tile that is at most half full is multiplied as half a tile.
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
                BM // parts,
                BN,
                BK,
            )


@triton.jit
def down_tile(
    hidden_ptr,
    hidden_scale_ptr,
    w,
    w_scale_ptr,
    returned_ptr,
    choices_ptr,
    expert,
    begin,
    end,
    first_column,
    num_choices,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    PANEL: tl.constexpr,
    DOT: tl.constexpr,
    DESC: tl.constexpr,
    HELD: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    choice = tl.load(choices_ptr + tl.arange(0, BM))
    live = choice < num_choices
    at = tl.where(live, choice, 0).to(tl.int64)
    x_rows = hidden_ptr + at * K
    x_scales = row_scales(hidden_scale_ptr, at, K)
    one_scale: tl.constexpr = WIDTH // _BLOCK * _BLOCK == WIDTH
    depth: tl.constexpr = (K + BK - 1) // BK
    if HELD:
        x0 = rows_tile(x_rows, 0, K, BK)
        x1 = rows_tile(x_rows, BK, K, BK) if depth > 1 else x0
        x2 = rows_tile(x_rows, 2 * BK, K, BK) if depth > 2 else x0
        x3 = rows_tile(x_rows, 3 * BK, K, BK) if depth > 3 else x0
    for in_panel in range(begin, end, BN):
        first = first_column + in_panel
        column = first + tl.arange(0, BN)
        inside = tl.minimum(column, WIDTH - 1) - first
        w_scales = scales_of(w_scale_ptr, expert, first, inside, WIDTH, K, one_scale)
        first_row = expert * WIDTH + first
        y = tl.zeros((BM, BN), tl.float32)
        if HELD:
            for i in tl.static_range(depth):
                x = x0 if i == 0 else (x1 if i == 1 else (x2 if i == 2 else x3))
                w_tile = weights_tile(w, first_row, inside, i * BK, K, BK, DESC)
                x_scale = multipliers(x_scales, i * BK // _BLOCK)
                y = add_block(y, x, w_tile, x_scale, w_scales, i * BK // _BLOCK, DOT, one_scale)
        else:
            for k in range(0, K, BK):
                x = rows_tile(x_rows, k, K, BK)
                w_tile = weights_tile(w, first_row, inside, k, K, BK, DESC)
                x_scale = multipliers(x_scales, k // _BLOCK)
                y = add_block(y, x, w_tile, x_scale, w_scales, k // _BLOCK, DOT, one_scale)
        to = returned_ptr + (at * PANEL)[:, None] + (in_panel + tl.arange(0, BN))[None, :]
        tl.store(to, y.to(returned_ptr.dtype.element_ty), mask=live[:, None] & (column < WIDTH)[None, :])


@triton.jit(do_not_specialize=["num_choices"])
def down_kernel(
    hidden_ptr,
    hidden_scale_ptr,
    w,
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
    DESC: tl.constexpr,
    SHORT: tl.constexpr,
    HELD: tl.constexpr,
    RUN: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Write what an expert returns for the choices of a tile, PANEL columns from `first_column` on.

    A program goes through RUN blocks of BN columns. HELD: it keeps its hidden rows, up to four blocks of BK columns.
    """
    blocks: tl.constexpr = (PANEL + BN * RUN - 1) // (BN * RUN)
    tile, expert, block = work_of(expert_of_tile_ptr, num_tiles_ptr, blocks)
    if expert < 0:
        return
    choices = choices_ptr + tile * BM
    begin = block * (BN * RUN)
    end = tl.minimum(tl.minimum(begin + BN * RUN, PANEL), WIDTH - first_column)
    half = half_empty(choices, num_choices, SHORT, BM)
    for parts in tl.static_range(1, SHORT + 2):
        if half == parts - 1:
            down_tile(
                hidden_ptr,
                hidden_scale_ptr,
                w,
                w_scale_ptr,
                returned_ptr,
                choices,
                expert,
                begin,
                end,
                first_column,
                num_choices,
                K,
                WIDTH,
                PANEL,
                DOT,
                DESC,
                HELD,
                BM // parts,
                BN,
                BK,
            )


@triton.jit(do_not_specialize=["num_rows", "num_choices"])
def combine_kernel(
    returned_ptr,
    ids_ptr,
    weights_ptr,
    num_rows,
    out_ptr,
    num_choices,
    first_column,
    WIDTH: tl.constexpr,
    PANEL: tl.constexpr,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROWS_ON_DEVICE: tl.constexpr,
    BLOCK: tl.constexpr,
):
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
