"""Choices in order of their expert, in Triton. Letters: T rows, k choices a row, E experts.

A choice is one of the T k pairs of a row and an expert, numbered row by row. Each expert's run is padded to whole
tiles; one program then multiplies one tile of one expert. Nothing is asked of the host: how many tiles there are is
known on the device, and programs beyond that number end at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
import triton
import triton.language as tl

from rocm_serve.ops.fp8 import BLOCK, fp8_max
from rocm_serve.ops.triton_common.triton import begin_in_turn, quantise_tile

_BLOCK = tl.constexpr(BLOCK)
_PIECE = 256  # choices that a program counts and places
_OTHERS_AT_ONCE = 8  # that it compares its own with
_PIECES_AT_ONCE = 1024
MOST_CHOICES = 8192  # that one program reads at once


@dataclass(frozen=True, slots=True)
class Order:
    """Choices in order of their expert, on the device."""

    ids_Tk: torch.Tensor
    choices: torch.Tensor  # int32, tiles of BM; the number of choices stands where a tile has no more
    expert_of_tile: torch.Tensor  # int32; from `place_few`: -1 for a tile that holds no choice
    num_tiles: torch.Tensor  # int32 [1]: tiles that hold a choice
    max_tiles: int

    @property
    def num_choices(self) -> int:
        return self.ids_Tk.numel()


def _empty_order(ids_Tk: torch.Tensor, num_experts: int, tile: int) -> Order:
    """Return an order with room for the most tiles that so many choices can need."""
    choices = ids_Tk.numel()
    max_tiles = (choices + min(choices, num_experts) * (tile - 1)) // tile
    made = {"dtype": torch.int32, "device": ids_Tk.device}
    return Order(
        ids_Tk,
        torch.empty(max_tiles * tile, **made),
        torch.empty(max_tiles, **made),
        torch.empty(1, **made),
        max_tiles,
    )


def sort_choices(ids_Tk: torch.Tensor, num_rows: int | torch.Tensor, num_experts: int, tile: int) -> Order:
    """Put the choices of the first `num_rows` rows in order of their expert; those of no expert here are left out.

    Three launches, each with a program for a piece of the choices or for an expert: pieces count theirs, experts add up
    what pieces before have, pieces place theirs.
    """
    order = _empty_order(ids_Tk, num_experts, tile)
    choices = order.num_choices
    pieces = triton.cdiv(choices, _PIECE)
    made = {"dtype": torch.int32, "device": ids_Tk.device}
    starts, totals = torch.empty(num_experts, pieces, **made), torch.empty(num_experts, **made)
    common = {
        "TOP_K": ids_Tk.shape[1],
        "EXPERTS": num_experts,
        "EXPERTS_BLOCK": triton.next_power_of_2(num_experts),
        "PIECE": _PIECE,
        "ROWS_ON_DEVICE": isinstance(num_rows, torch.Tensor),
    }
    count_choices_kernel[(pieces,)](ids_Tk, num_rows, starts, pieces, choices, **common)
    add_up_counts_kernel[(num_experts,)](starts, totals, pieces, BLOCK=_PIECES_AT_ONCE)
    place_choices_kernel[(num_experts + pieces,)](
        ids_Tk,
        num_rows,
        starts,
        totals,
        order.choices,
        order.expert_of_tile,
        order.num_tiles,
        pieces,
        choices,
        BM=tile,
        OTHERS=_OTHERS_AT_ONCE,
        **common,
    )
    return order


def place_few(
    ids_Tk: torch.Tensor,
    num_rows: int | torch.Tensor,
    num_experts: int,
    tile: int,
    x: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    launch: Mapping[str, bool] = MappingProxyType({"PDL": False}),
) -> tuple[Order, torch.Tensor | None, torch.Tensor | None]:
    """Do what `sort_choices` does, and quantise the rows `x` to `dtype` beside it, in one launch.

    Shapes: x [T, H] -> FP8 values [T, H] and fp32 multipliers [T, ceil(H / 128)]. At most MOST_CHOICES choices.
    `launch`: how the kernel follows the one before it, see `begin`.
    """
    order = _empty_order(ids_Tk, num_experts, tile)
    assert order.num_choices <= MOST_CHOICES, f"{order.num_choices} choices are too many for one program"
    rows, width, tile_rows = ids_Tk.shape[0], 0, 4 if ids_Tk.shape[0] <= 64 else 16
    values, scales, blocks = None, None, 0
    if x is not None:
        width = x.shape[1]
        values = torch.empty(rows, width, dtype=dtype, device=x.device)
        scales = torch.empty(rows, triton.cdiv(width, BLOCK), dtype=torch.float32, device=x.device)
        blocks = triton.cdiv(rows, tile_rows) * scales.shape[1]
    place_few_kernel[(num_experts + blocks,)](
        ids_Tk,
        num_rows,
        order.choices,
        order.expert_of_tile,
        order.num_tiles,
        order.num_choices,
        order.max_tiles,
        x,
        values,
        scales,
        0 if x is None else x.stride(0),
        rows,
        EXPERTS=num_experts,
        EXPERTS_BLOCK=triton.next_power_of_2(num_experts),
        CHOICES=max(128, triton.next_power_of_2(order.num_choices)),
        TILES=triton.next_power_of_2(order.max_tiles),
        BM=tile,
        TOP_K=ids_Tk.shape[1],
        ROWS_ON_DEVICE=isinstance(num_rows, torch.Tensor),
        WIDTH=width,
        TOP=fp8_max(dtype) if dtype is not None else 0.0,
        ROWS=tile_rows,
        num_warps=4,
        **launch,
    )
    return order, values, scales


@triton.jit
def expert_of(ids_ptr, choice, num_choices, num_rows, TOP_K: tl.constexpr, ROWS_ON_DEVICE: tl.constexpr):
    """Return the expert of each choice, -1 for those of padding rows."""
    if ROWS_ON_DEVICE:
        live = tl.load(num_rows).to(tl.int32)
    else:
        live = num_rows
    return tl.load(ids_ptr + choice, mask=choice < tl.minimum(live * TOP_K, num_choices), other=-1)


@triton.jit(do_not_specialize=["num_rows", "num_pieces", "num_choices"])
def count_choices_kernel(
    ids_ptr,
    num_rows,
    counts_ptr,
    num_pieces,
    num_choices,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    PIECE: tl.constexpr,
    ROWS_ON_DEVICE: tl.constexpr,
):
    piece = tl.program_id(0)
    choice = piece * PIECE + tl.arange(0, PIECE)
    expert = expert_of(ids_ptr, choice, num_choices, num_rows, TOP_K, ROWS_ON_DEVICE)
    held = (expert >= 0) & (expert < EXPERTS)
    counts = tl.histogram(tl.where(held, expert, 0), EXPERTS_BLOCK, mask=held)
    other = tl.arange(0, EXPERTS_BLOCK)
    tl.store(counts_ptr + other * num_pieces + piece, counts, mask=other < EXPERTS)


@triton.jit(do_not_specialize=["num_pieces"])
def add_up_counts_kernel(counts_ptr, totals_ptr, num_pieces, BLOCK: tl.constexpr):
    """Replace the counts of an expert by the sums of those before, and write the sum of all."""
    expert = tl.program_id(0)
    total = expert * 0  # a number of the device, as the loop carries it
    for first in range(0, num_pieces, BLOCK):
        piece = first + tl.arange(0, BLOCK)
        at = counts_ptr + expert * num_pieces + piece
        count = tl.load(at, mask=piece < num_pieces, other=0)
        tl.store(at, total + tl.cumsum(count, 0) - count, mask=piece < num_pieces)
        total += tl.sum(count, 0)
    tl.store(totals_ptr + expert, total)


@triton.jit(do_not_specialize=["num_rows", "num_pieces", "num_choices"])
def place_choices_kernel(
    ids_ptr,
    num_rows,
    starts_ptr,
    totals_ptr,
    choices_ptr,
    expert_of_tile_ptr,
    num_tiles_ptr,
    num_pieces,
    num_choices,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    PIECE: tl.constexpr,
    ROWS_ON_DEVICE: tl.constexpr,
    BM: tl.constexpr,
    OTHERS: tl.constexpr,
):
    """One program for each expert, which names its tiles and fills the last, then one for each piece of the choices."""
    other = tl.arange(0, EXPERTS_BLOCK)
    totals = tl.load(totals_ptr + other, mask=other < EXPERTS, other=0)
    tiles = (totals + BM - 1) // BM
    program = tl.program_id(0)
    if program < EXPERTS:
        first_tile = tl.sum(tl.where(other < program, tiles, 0), 0)
        own_tiles = tl.sum(tl.where(other == program, tiles, 0), 0)
        rest = tl.sum(tl.where(other == program, totals, 0), 0) + tl.arange(0, BM)
        empty = tl.zeros((BM,), tl.int32) + num_choices
        tl.store(choices_ptr + first_tile * BM + rest, empty, mask=rest < own_tiles * BM)
        for tile in range(0, own_tiles):
            tl.store(expert_of_tile_ptr + first_tile + tile, program)
        if program == EXPERTS - 1:
            tl.store(num_tiles_ptr, first_tile + own_tiles)
    else:
        piece = program - EXPERTS
        place = tl.arange(0, PIECE)
        choice = piece * PIECE + place
        expert = expert_of(ids_ptr, choice, num_choices, num_rows, TOP_K, ROWS_ON_DEVICE)
        held = (expert >= 0) & (expert < EXPERTS)
        before = tl.zeros((PIECE,), tl.int32)  # choices of the same expert that come first, in this piece
        for first in range(0, PIECE, OTHERS):
            near = first + tl.arange(0, OTHERS)
            same = expert_of(ids_ptr, piece * PIECE + near, num_choices, num_rows, TOP_K, ROWS_ON_DEVICE)
            earlier = (same[None, :] == expert[:, None]) & (near[None, :] < place[:, None])
            before += tl.sum(earlier.to(tl.int32), 1)
        at = tl.gather((tl.cumsum(tiles, 0) - tiles) * BM, tl.where(held, expert, 0), 0)
        at += tl.load(starts_ptr + expert * num_pieces + piece, mask=held, other=0) + before
        tl.store(choices_ptr + at, choice, mask=held)


@triton.jit(do_not_specialize=["num_rows", "num_choices", "max_tiles", "all_rows"])
def place_few_kernel(
    ids_ptr,
    num_rows,
    choices_ptr,
    expert_of_tile_ptr,
    num_tiles_ptr,
    num_choices,
    max_tiles,
    x_ptr,
    q_ptr,
    s_ptr,
    x_stride,
    all_rows,
    EXPERTS: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    CHOICES: tl.constexpr,
    TILES: tl.constexpr,
    BM: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS_ON_DEVICE: tl.constexpr,
    WIDTH: tl.constexpr,
    TOP: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program for each expert, which counts all choices itself, then one for each block of rows."""
    begin_in_turn(PDL)
    program = tl.program_id(0)
    if program < EXPERTS:
        choice = tl.arange(0, CHOICES)
        expert = expert_of(ids_ptr, choice, num_choices, num_rows, TOP_K, ROWS_ON_DEVICE)
        held = (expert >= 0) & (expert < EXPERTS)
        tiles = (tl.histogram(tl.where(held, expert, 0), EXPERTS_BLOCK, mask=held) + BM - 1) // BM
        other = tl.arange(0, EXPERTS_BLOCK)
        first_tile = tl.sum(tl.where(other < program, tiles, 0), 0)
        own_tiles = tl.sum(tl.where(other == program, tiles, 0), 0)
        one = (expert == program).to(tl.int32)
        at = choices_ptr + first_tile * BM
        tl.store(at + tl.cumsum(one, 0) - one, choice, mask=one > 0)
        rest = tl.sum(one, 0) + tl.arange(0, BM)
        tl.store(at + rest, tl.zeros((BM,), tl.int32) + num_choices, mask=rest < own_tiles * BM)
        tile = tl.arange(0, TILES)
        own = (tile >= first_tile) & (tile < first_tile + own_tiles)
        tl.store(expert_of_tile_ptr + tile, tl.zeros((TILES,), tl.int32) + program, mask=own)
        if program == EXPERTS - 1:
            found = first_tile + own_tiles
            tl.store(num_tiles_ptr, found)
            none = (tile >= found) & (tile < max_tiles)
            tl.store(expert_of_tile_ptr + tile, tl.zeros((TILES,), tl.int32) - 1, mask=none)
    elif x_ptr is not None:
        blocks: tl.constexpr = (WIDTH + _BLOCK - 1) // _BLOCK
        block = (program - EXPERTS) % blocks
        row = (program - EXPERTS) // blocks * ROWS + tl.arange(0, ROWS)
        column = block * _BLOCK + tl.arange(0, _BLOCK)
        wide = row.to(tl.int64)
        live = (row < all_rows)[:, None] & (column < WIDTH)[None, :]
        x = tl.load(x_ptr + (wide * x_stride)[:, None] + column[None, :], mask=live, other=0.0).to(tl.float32)
        q, scale = quantise_tile(x, TOP, q_ptr.dtype.element_ty)
        tl.store(q_ptr + (wide * WIDTH)[:, None] + column[None, :], q, mask=live)
        tl.store(s_ptr + wide * blocks + block, scale, mask=row < all_rows)
