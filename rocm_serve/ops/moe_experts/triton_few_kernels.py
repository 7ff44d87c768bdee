"""Kernels of the experts of few rows; see triton_few.py. Letters: T rows, k choices a row.

In kernels: BM choices of a tile, BN rows of a weight, BK columns of both at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rocm_serve.ops.fp8 import BLOCK
from rocm_serve.ops.moe_experts.triton_order import expert_of
from rocm_serve.ops.triton_common.triton import let_next_begin, quantise_tile, wait_for_previous

_BLOCK = tl.constexpr(BLOCK)


@triton.jit
def expert_and_choices(
    ids_ptr,
    num_rows,
    choices_ptr,
    expert_of_tile_ptr,
    num_choices,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS_ON_DEVICE: tl.constexpr,
    BM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Return the expert of a program's tile, -1 for one without work, and its choices, `num_choices` for none."""
    wait_for_previous(PDL)
    tile = tl.program_id(0)
    place = tl.arange(0, BM)
    if choices_ptr is None:
        expert = expert_of(ids_ptr, tile, num_choices, num_rows, TOP_K, ROWS_ON_DEVICE)
        expert = tl.where(expert < EXPERTS, expert, -1)
        choice = tl.where(place == 0, tile, num_choices)
    else:
        expert = tl.load(expert_of_tile_ptr + tile)
        choice = tl.load(choices_ptr + tile * BM + place)
    return expert.to(tl.int64), choice


@triton.jit
def weight_tile(rows, at, K: tl.constexpr, STEP: tl.constexpr):
    if K % STEP == 0:
        w = tl.load(rows[:, None] + at[None, :])
    else:
        w = tl.load(rows[:, None] + at[None, :], mask=(at < K)[None, :], other=0.0)
    return w


@triton.jit
def row_tile(rows, live, at, K: tl.constexpr, STEP: tl.constexpr):
    if K % STEP == 0:
        x = tl.load(rows[None, :] + at[:, None], mask=live[None, :], other=0.0)
    else:
        x = tl.load(rows[None, :] + at[:, None], mask=live[None, :] & (at < K)[:, None], other=0.0)
    return x


@triton.jit
def block_at(k, K: tl.constexpr):
    """Return the block of scales of column `k`, the last one for a column past the end."""
    return tl.minimum(k, K - 1) // _BLOCK


@triton.jit
def added(total, w, x, w_scales, x_scales, live, block, DOT: tl.constexpr, ONE_SCALE: tl.constexpr):
    """Add the product of two tiles to [BN, BM]. Within 128 columns products are summed first, then rescaled.

    `w_scales` points to the multipliers of each row of the weight, or with ONE_SCALE to those of all.
    """
    if w_scales is None:
        total = tl.dot(w.to(DOT), x.to(DOT), total, input_precision="ieee")
    else:
        part = tl.dot(w.to(DOT), x.to(DOT), input_precision="ieee")
        scale = tl.load(w_scales + block)
        if ONE_SCALE:
            if x_scales is None:
                total += part * scale
            else:
                total += part * (scale * tl.load(x_scales + block, mask=live, other=0.0))[None, :]
        else:
            part *= scale[:, None]
            if x_scales is not None:
                part *= tl.load(x_scales + block, mask=live, other=0.0)[None, :]
            total += part
    return total


@triton.jit
def products(
    x_rows,
    live,
    x_scales,
    w_rows,
    w_scales,
    first,
    last,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    UNROLL: tl.constexpr,
    DOT: tl.constexpr,
    ONE_SCALE: tl.constexpr,
):
    """Multiply BN rows of a weight with BM rows along columns `first` to `last`, UNROLL steps of BK at a time."""
    total = tl.zeros((BN, BM), tl.float32)
    for k in range(first, last, BK * UNROLL):
        for u in tl.static_range(UNROLL):
            at = k + u * BK + tl.arange(0, BK)
            x = row_tile(x_rows, live, at, K, BK * UNROLL)
            w = weight_tile(w_rows, at, K, BK * UNROLL)
            total = added(total, w, x, w_scales, x_scales, live, block_at(k + u * BK, K), DOT, ONE_SCALE)
    return total


@triton.jit
def scales_of(w_scale_ptr, expert, first, column, K: tl.constexpr, WIDTH: tl.constexpr, ONE_SCALE: tl.constexpr):
    """Point to where the multipliers of rows of a weight begin; `first` is the first of these rows."""
    scales: tl.constexpr = (K + _BLOCK - 1) // _BLOCK
    own = w_scale_ptr + expert * ((WIDTH + _BLOCK - 1) // _BLOCK * scales)
    if ONE_SCALE:
        of_rows = own + first // _BLOCK * scales
    else:
        of_rows = own + column // _BLOCK * scales
    return of_rows


@triton.jit
def store_hidden(hidden, choice, live, column, hidden_ptr, hidden_scale_ptr, WIDTH: tl.constexpr, TOP: tl.constexpr):
    """Store hidden rows [choices, columns], quantised where they have scales: the program's block of columns."""
    inside = (column < WIDTH)[None, :]
    at = choice.to(tl.int64)
    if hidden_scale_ptr is not None:
        hidden, scale = quantise_tile(tl.where(inside, hidden, 0.0), TOP, hidden_ptr.dtype.element_ty)
        blocks: tl.constexpr = (WIDTH + _BLOCK - 1) // _BLOCK
        tl.store(hidden_scale_ptr + at * blocks + tl.program_id(1), scale, mask=live)
    stored = live[:, None] & inside
    tl.store(hidden_ptr + (at * WIDTH)[:, None] + column[None, :], hidden.to(hidden_ptr.dtype.element_ty), mask=stored)


@triton.jit(do_not_specialize=["num_rows", "num_choices"])
def few_gate_up_kernel(
    x_ptr,
    x_scale_ptr,
    w_ptr,
    w_scale_ptr,
    hidden_ptr,
    hidden_scale_ptr,
    ids_ptr,
    num_rows,
    choices_ptr,
    expert_of_tile_ptr,
    x_stride,
    num_choices,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    TOP: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS_ON_DEVICE: tl.constexpr,
    DOT: tl.constexpr,
    ONE_SCALE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    UNROLL: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply the rows of a tile with as many rows of gate and of up at once, and quantise what they make."""
    expert, choice = expert_and_choices(
        ids_ptr, num_rows, choices_ptr, expert_of_tile_ptr, num_choices, EXPERTS, TOP_K, ROWS_ON_DEVICE, BM, PDL
    )
    if expert < 0:
        return
    live = choice < num_choices
    row = (choice // TOP_K).to(tl.int64)
    first = tl.program_id(1) * BN
    column = first + tl.arange(0, BN)
    inside = tl.minimum(column, WIDTH - 1)  # rows of the weight are read twice rather than masked
    x_scales = None
    gate_scales = None
    up_scales = None
    if x_scale_ptr is not None:
        x_scales = x_scale_ptr + row * ((K + _BLOCK - 1) // _BLOCK)
    if w_scale_ptr is not None:
        gate_scales = scales_of(w_scale_ptr, expert, first, inside, K, 2 * WIDTH, ONE_SCALE)
        up_scales = scales_of(w_scale_ptr, expert, first + WIDTH, inside + WIDTH, K, 2 * WIDTH, ONE_SCALE)
    gate_rows = w_ptr + (expert * (2 * WIDTH) + inside) * K
    gate = tl.zeros((BN, BM), tl.float32)
    up = tl.zeros((BN, BM), tl.float32)
    for k in range(0, K, BK * UNROLL):
        for u in tl.static_range(UNROLL):
            at = k + u * BK + tl.arange(0, BK)
            block = block_at(k + u * BK, K)
            x = row_tile(x_ptr + row * x_stride, live, at, K, BK * UNROLL)
            gate_w = weight_tile(gate_rows, at, K, BK * UNROLL)
            up_w = weight_tile(gate_rows + WIDTH * K, at, K, BK * UNROLL)
            gate = added(gate, gate_w, x, gate_scales, x_scales, live, block, DOT, ONE_SCALE)
            up = added(up, up_w, x, up_scales, x_scales, live, block, DOT, ONE_SCALE)
    hidden = tl.trans(gate * tl.sigmoid(gate) * up)
    store_hidden(hidden, choice, live, column, hidden_ptr, hidden_scale_ptr, WIDTH, TOP)


@triton.jit(do_not_specialize=["num_rows", "num_choices"])
def few_partial_kernel(
    x_ptr,
    x_scale_ptr,
    w_ptr,
    w_scale_ptr,
    parts_ptr,
    ids_ptr,
    num_rows,
    choices_ptr,
    expert_of_tile_ptr,
    x_stride,
    num_choices,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS_ON_DEVICE: tl.constexpr,
    DOT: tl.constexpr,
    ONE_SCALE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    UNROLL: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply the rows of a tile with rows of gate or up along a part of K: [SPLITS, T k, WIDTH] in float32."""
    expert, choice = expert_and_choices(
        ids_ptr, num_rows, choices_ptr, expert_of_tile_ptr, num_choices, EXPERTS, TOP_K, ROWS_ON_DEVICE, BM, PDL
    )
    if expert < 0:
        return
    live = choice < num_choices
    row = (choice // TOP_K).to(tl.int64)
    first = tl.program_id(1) * BN
    column = first + tl.arange(0, BN)
    inside = tl.minimum(column, WIDTH - 1)
    scales: tl.constexpr = (K + _BLOCK - 1) // _BLOCK
    x_scales = None
    w_scales = None
    if x_scale_ptr is not None:
        x_scales = x_scale_ptr + row * scales
    if w_scale_ptr is not None:
        w_scales = scales_of(w_scale_ptr, expert, first, inside, K, WIDTH, ONE_SCALE)
    x_rows = x_ptr + row * x_stride
    w_rows = w_ptr + (expert * WIDTH + inside) * K
    part: tl.constexpr = (scales + SPLITS * UNROLL - 1) // (SPLITS * UNROLL) * UNROLL * _BLOCK  # whole blocks of scales
    split = tl.program_id(2)
    last = tl.minimum((split + 1) * part, K)
    y = products(x_rows, live, x_scales, w_rows, w_scales, split * part, last, K, BM, BN, BK, UNROLL, DOT, ONE_SCALE)
    let_next_begin(PDL)
    at = (split.to(tl.int64) * num_choices + choice) * WIDTH
    tl.store(parts_ptr + at[None, :] + column[:, None], y, mask=live[None, :] & (column < WIDTH)[:, None])


@triton.jit(do_not_specialize=["num_choices"])
def few_activate_kernel(
    parts_ptr,
    hidden_ptr,
    hidden_scale_ptr,
    num_choices,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    TOP: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
    EARLY: tl.constexpr = False,
):
    """Add up the parts of gate and up, and quantise what they make. What no program has written is read by none."""
    wait_for_previous(PDL)
    let_next_begin(PDL and EARLY)
    choice = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * _BLOCK + tl.arange(0, _BLOCK)
    live = (choice < num_choices)[:, None] & (column < WIDTH)[None, :]
    gate = tl.zeros((ROWS, _BLOCK), tl.float32)
    up = tl.zeros((ROWS, _BLOCK), tl.float32)
    for split in tl.static_range(SPLITS):
        at = (split * num_choices.to(tl.int64) + choice) * (2 * WIDTH)
        from_here = parts_ptr + at[:, None] + column[None, :]
        gate += tl.load(from_here, mask=live, other=0.0)
        up += tl.load(from_here + WIDTH, mask=live, other=0.0)
    let_next_begin(PDL and not EARLY)
    hidden = gate * tl.sigmoid(gate) * up
    store_hidden(hidden, choice, choice < num_choices, column, hidden_ptr, hidden_scale_ptr, WIDTH, TOP)


@triton.jit(do_not_specialize=["num_rows", "num_choices"])
def few_down_kernel(
    hidden_ptr,
    hidden_scale_ptr,
    w_ptr,
    w_scale_ptr,
    returned_ptr,
    ids_ptr,
    num_rows,
    choices_ptr,
    expert_of_tile_ptr,
    num_choices,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS_ON_DEVICE: tl.constexpr,
    DOT: tl.constexpr,
    ONE_SCALE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    UNROLL: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write what an expert returns for each choice: [T k, WIDTH] in float32."""
    expert, choice = expert_and_choices(
        ids_ptr, num_rows, choices_ptr, expert_of_tile_ptr, num_choices, EXPERTS, TOP_K, ROWS_ON_DEVICE, BM, PDL
    )
    if expert < 0:
        return
    live = choice < num_choices
    at = choice.to(tl.int64)
    first = tl.program_id(1) * BN
    column = first + tl.arange(0, BN)
    inside = tl.minimum(column, WIDTH - 1)
    scales: tl.constexpr = (K + _BLOCK - 1) // _BLOCK
    x_scales = None
    w_scales = None
    if hidden_scale_ptr is not None:
        x_scales = hidden_scale_ptr + at * scales
    if w_scale_ptr is not None:
        w_scales = scales_of(w_scale_ptr, expert, first, inside, K, WIDTH, ONE_SCALE)
    x_rows = hidden_ptr + at * K
    w_rows = w_ptr + (expert * WIDTH + inside) * K
    y = products(x_rows, live, x_scales, w_rows, w_scales, 0, K, K, BM, BN, BK, UNROLL, DOT, ONE_SCALE)
    let_next_begin(PDL)
    to = returned_ptr + (at * WIDTH)[None, :] + column[:, None]
    tl.store(to, y, mask=live[None, :] & (column < WIDTH)[:, None])


@triton.jit(do_not_specialize=["num_rows", "num_choices"])
def few_combine_kernel(
    returned_ptr,
    weights_ptr,
    out_ptr,
    ids_ptr,
    num_rows,
    num_choices,
    WIDTH: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS_ON_DEVICE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sum what the experts of a row returned, weighted, in the order of its choices."""
    wait_for_previous(PDL)
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(TOP_K):
        choice = row * TOP_K + j
        expert = expert_of(ids_ptr, choice, num_choices, num_rows, TOP_K, ROWS_ON_DEVICE)
        held = (expert >= 0) & (expert < EXPERTS)
        weight = tl.load(weights_ptr + choice, mask=held, other=0.0)
        at = returned_ptr + choice.to(tl.int64) * WIDTH + column
        total += tl.load(at, mask=column < tl.where(held, WIDTH, 0), other=0.0) * weight
    let_next_begin(PDL)
    out_at = out_ptr + row.to(tl.int64) * WIDTH + column
    tl.store(out_at, total.to(out_ptr.dtype.element_ty), mask=column < WIDTH)


@triton.jit(do_not_specialize=["num_rows", "num_choices"])
def few_down_combine_kernel(
    hidden_ptr,
    hidden_scale_ptr,
    w_ptr,
    w_scale_ptr,
    weights_ptr,
    out_ptr,
    ids_ptr,
    num_rows,
    num_choices,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    CHOSEN: tl.constexpr,
    ROWS_ON_DEVICE: tl.constexpr,
    DOT: tl.constexpr,
    ONE_SCALE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    UNROLL: tl.constexpr,
    PDL: tl.constexpr,
):
    """Go through the experts of one row in one loop, so that loads never pause between two of them."""
    wait_for_previous(PDL)
    row = tl.program_id(0)
    first = tl.program_id(1) * BN
    column = first + tl.arange(0, BN)
    inside = tl.minimum(column, WIDTH - 1)
    place = tl.arange(0, BM)  # the row is the first of BM, the others are empty
    steps: tl.constexpr = (K + BK * UNROLL - 1) // (BK * UNROLL)
    chosen = tl.arange(0, CHOSEN)
    of_row = tl.where(chosen < TOP_K, row * TOP_K + chosen, num_choices)
    experts = expert_of(ids_ptr, of_row, num_choices, num_rows, TOP_K, ROWS_ON_DEVICE)
    weights = tl.load(weights_ptr + of_row, mask=(experts >= 0) & (experts < EXPERTS), other=0.0)
    total = tl.zeros((BN, BM), tl.float32)
    for step in range(0, TOP_K * steps):
        j = step // steps
        expert = tl.sum(tl.where(chosen == j, experts, 0), 0)
        held = tl.where((expert >= 0) & (expert < EXPERTS), 1, 0)
        own = (expert * held).to(tl.int64)
        at = (row * TOP_K + j).to(tl.int64) + place * 0
        x_scales = None
        w_scales = None
        if hidden_scale_ptr is not None:
            x_scales = hidden_scale_ptr + at * ((K + _BLOCK - 1) // _BLOCK)
        if w_scale_ptr is not None:
            w_scales = scales_of(w_scale_ptr, own, first, inside, K, WIDTH, ONE_SCALE)
        part = tl.zeros((BN, BM), tl.float32)
        for u in tl.static_range(UNROLL):
            k = (step % steps * UNROLL + u) * BK
            deep = k + tl.arange(0, BK)
            x = row_tile(hidden_ptr + at * K, place < held, deep, K, BK * UNROLL)
            w_at = (w_ptr + (own * WIDTH + inside) * K)[:, None] + deep[None, :]
            w = tl.load(w_at, mask=(deep < held * K)[None, :], other=0.0)
            part = added(part, w, x, w_scales, x_scales, place < held, block_at(k, K), DOT, ONE_SCALE)
        total += part * tl.sum(tl.where(chosen == j, weights, 0.0), 0)
    y = tl.sum(tl.where((place == 0)[None, :], total, 0.0), 1)
    tl.store(out_ptr + row.to(tl.int64) * WIDTH + column, y.to(out_ptr.dtype.element_ty), mask=column < WIDTH)
