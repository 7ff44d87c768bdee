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
from rocm_serve.ops.triton_common.triton import quantise_tile

_BLOCK = tl.constexpr(BLOCK)
_CHOICES_AT_ONCE = 1024
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
        ids_Tk, torch.empty(max_tiles * tile, **made), torch.empty(max_tiles, **made), torch.empty(1, **made), max_tiles
    )


def sort_choices(ids_Tk: torch.Tensor, num_rows: int | torch.Tensor, num_experts: int, tile: int) -> Order:
    """Put the choices of the first `num_rows` rows in order of their expert; those of no expert here are left out."""
    order = _empty_order(ids_Tk, num_experts, tile)
    choices = order.num_choices
    counts = torch.empty(num_experts, dtype=torch.int32, device=ids_Tk.device)
    common = {
        "TOP_K": ids_Tk.shape[1],
        "ROWS_ON_DEVICE": isinstance(num_rows, torch.Tensor),
        "BLOCK": _CHOICES_AT_ONCE,
    }
    count_choices_kernel[(num_experts,)](ids_Tk, num_rows, counts, choices, **common)
    place_choices_kernel[(num_experts,)](
        ids_Tk,
        num_rows,
        counts,
        order.choices,
        order.expert_of_tile,
        order.num_tiles,
        choices,
        EXPERTS=num_experts,
        EXPERTS_BLOCK=triton.next_power_of_2(num_experts),
        BM=tile,
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
    `launch`: how the kernel follows the one before it, see `after_the_kernel_before`.
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
def after_the_kernel_before(PDL: tl.constexpr):
    """Wait until the kernel before has written its results, where NVIDIA's programmatic dependent launch is used.

    Programs are put on the device while that kernel ends, and those of the next kernel while this one does. Every
    kernel that is launched so must wait before it reads: whether the one after it may start hangs on nothing else.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def expert_of(ids_ptr, choice, num_choices, num_rows, TOP_K: tl.constexpr, ROWS_ON_DEVICE: tl.constexpr):
    """Return the expert of each choice, -1 for those of padding rows."""
    if ROWS_ON_DEVICE:
        live = tl.load(num_rows).to(tl.int32)
    else:
        live = num_rows
    return tl.load(ids_ptr + choice, mask=choice < tl.minimum(live * TOP_K, num_choices), other=-1)


@triton.jit(do_not_specialize=["num_rows", "num_choices"])
def count_choices_kernel(
    ids_ptr,
    num_rows,
    counts_ptr,
    num_choices,
    TOP_K: tl.constexpr,
    ROWS_ON_DEVICE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    expert = tl.program_id(0)
    found = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, num_choices, BLOCK):
        choice = first + tl.arange(0, BLOCK)
        own = expert_of(ids_ptr, choice, num_choices, num_rows, TOP_K, ROWS_ON_DEVICE) == expert
        found += own.to(tl.int32)
    tl.store(counts_ptr + expert, tl.sum(found, 0))


@triton.jit(do_not_specialize=["num_rows", "num_choices"])
def place_choices_kernel(
    ids_ptr,
    num_rows,
    counts_ptr,
    choices_ptr,
    expert_of_tile_ptr,
    num_tiles_ptr,
    num_choices,
    EXPERTS: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    BM: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS_ON_DEVICE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Every program places the choices of one expert, in their own order: the result is the same every time."""
    expert = tl.program_id(0)
    other = tl.arange(0, EXPERTS_BLOCK)
    tiles = (tl.load(counts_ptr + other, mask=other < EXPERTS, other=0) + BM - 1) // BM
    first_tile = tl.sum(tl.where(other < expert, tiles, 0), 0)
    own_tiles = tl.sum(tl.where(other == expert, tiles, 0), 0)
    if expert == EXPERTS - 1:
        tl.store(num_tiles_ptr, first_tile + own_tiles)
    if own_tiles > 0:
        at = choices_ptr + first_tile * BM
        placed = own_tiles * 0  # a number of the device, as the loop carries it
        for first in range(0, num_choices, BLOCK):
            choice = first + tl.arange(0, BLOCK)
            own = expert_of(ids_ptr, choice, num_choices, num_rows, TOP_K, ROWS_ON_DEVICE) == expert
            one = own.to(tl.int32)
            tl.store(at + placed + tl.cumsum(one, 0) - one, choice, mask=own)
            placed += tl.sum(one, 0)
        rest = placed + tl.arange(0, BM)
        tl.store(at + rest, tl.zeros((BM,), tl.int32) + num_choices, mask=rest < own_tiles * BM)
        for tile in range(0, own_tiles):
            tl.store(expert_of_tile_ptr + first_tile + tile, expert)


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
    after_the_kernel_before(PDL)
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
