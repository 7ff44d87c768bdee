"""Kernels of the experts of many rows: the way down; see triton_grouped.py.

Letters: K hidden columns. In kernels: BM choices of a tile, BN rows of a weight, BK columns of both at a time; `w`: see
triton_grouped_tiles.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rocm_serve.ops.fp8 import BLOCK
from rocm_serve.ops.moe_experts.triton_grouped_tiles import (
    add_block,
    half_empty,
    multipliers,
    row_scales,
    rows_tile,
    scales_of,
    weights_tile,
    work_of,
)

_BLOCK = tl.constexpr(BLOCK)


@triton.jit
def down_tile(
    hidden_ptr, hidden_scale_ptr, w, w_scale_ptr, returned_ptr, choices_ptr, first_place, expert, begin, end,
    first_column, num_choices,
    K: tl.constexpr, WIDTH: tl.constexpr, PANEL: tl.constexpr, DOT: tl.constexpr, DESC: tl.constexpr,
    HELD: tl.constexpr, TILED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    choice = tl.load(choices_ptr + tl.arange(0, BM))
    live = choice < num_choices
    at = tl.where(live, choice, 0).to(tl.int64)
    row = at
    if TILED:
        row = first_place + tl.arange(0, BM)
    x_rows = hidden_ptr + row * K
    x_scales = row_scales(hidden_scale_ptr, row, K)
    one_scale: tl.constexpr = WIDTH // _BLOCK * _BLOCK == WIDTH
    depth: tl.constexpr = (K + BK - 1) // BK
    if HELD:
        tl.static_assert(depth <= 4, "a program keeps four blocks of hidden columns at most")
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
    hidden_ptr, hidden_scale_ptr, w, w_scale_ptr, returned_ptr, choices_ptr, expert_of_tile_ptr, num_tiles_ptr,
    num_choices, first_column,
    K: tl.constexpr, WIDTH: tl.constexpr, PANEL: tl.constexpr, DOT: tl.constexpr, DESC: tl.constexpr,
    SHORT: tl.constexpr, HELD: tl.constexpr, TILED: tl.constexpr, RUN: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Write what an expert returns for the choices of a tile, PANEL columns from `first_column` on.

    A program goes through RUN blocks of BN columns. HELD: it keeps its hidden rows, up to four blocks of BK columns.
    TILED: hidden rows lie in the order of the tiles.
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
                tile.to(tl.int64) * BM,
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
                TILED,
                BM // parts,
                BN,
                BK,
            )


@triton.jit(do_not_specialize=["num_choices"])
def down_in_turn_kernel(
    hidden, hidden_scale_ptr, w, w_scale_ptr, returned_ptr, choices_ptr, expert_of_tile_ptr, num_tiles_ptr,
    num_choices, first_column,
    K: tl.constexpr, WIDTH: tl.constexpr, PANEL: tl.constexpr, PROGRAMS: tl.constexpr, DOT: tl.constexpr,
    DESC: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Do what `down_kernel` does with hidden rows in the order of the tiles, in PROGRAMS programs.

    Each takes one block of columns of a tile after the other. With DESC `hidden` is a descriptor too, of tiles of
    [BM, BK], and the two loops are made one, so that what is multiplied next is asked for meanwhile.
    """
    blocks: tl.constexpr = (PANEL + BN - 1) // BN
    one_scale: tl.constexpr = WIDTH // _BLOCK * _BLOCK == WIDTH
    end = tl.minimum(PANEL, WIDTH - first_column)
    for work in tl.range(tl.program_id(0), tl.load(num_tiles_ptr) * blocks, PROGRAMS, flatten=DESC):
        tile = work // blocks
        in_panel = work % blocks * BN
        expert = tl.load(expert_of_tile_ptr + tile)
        place = tile.to(tl.int64) * BM + tl.arange(0, BM)
        x_scales = row_scales(hidden_scale_ptr, place, K)
        first = first_column + in_panel
        column = in_panel + tl.arange(0, BN)
        inside = tl.minimum(first_column + column, WIDTH - 1) - first
        w_scales = scales_of(w_scale_ptr, expert, first, inside, WIDTH, K, one_scale)
        y = tl.zeros((BM, BN), tl.float32)
        for k in tl.range(0, K, BK):
            if DESC:
                x = hidden.load([tile * BM, k])
            else:
                x = rows_tile(hidden + place * K, k, K, BK)
            w_tile = weights_tile(w, expert * WIDTH + first, inside, k, K, BK, DESC)
            y = add_block(y, x, w_tile, multipliers(x_scales, k // _BLOCK), w_scales, k // _BLOCK, DOT, one_scale)
        choice = tl.load(choices_ptr + place)
        to = returned_ptr + (choice.to(tl.int64) * PANEL)[:, None] + column[None, :]
        live = (choice < num_choices)[:, None] & (column < end)[None, :]
        tl.store(to, y.to(returned_ptr.dtype.element_ty), mask=live)
