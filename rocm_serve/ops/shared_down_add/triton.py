"""A shared expert from its gate and up on, and the sum with the routed ones, in one launch.

Every program makes the hidden rows for itself, as that of ops/add_norm_linear makes a norm. Of a few rows, each is
multiplied in place with rows of the weight that are on their way before the program waits; more stand on the right of
matrix instructions.

Letters: T rows, I width of the expert, H width; in kernels, BN rows of a weight, BK columns at a time, BM rows of a
tile, ROWS those of the step, rounded up to a power of two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rocm_serve.ops.linear.triton_few import ask_for, times, whole_rows
from rocm_serve.ops.tiles import tile
from rocm_serve.ops.tiles_linear import SHARED_ROWS
from rocm_serve.ops.triton_common.triton import (
    arch,
    blocks,
    following,
    let_next_begin,
    rows_of,
    wait_for_previous,
)


def shared_down_add(
    routed_TH: torch.Tensor, gate_up_TI: torch.Tensor, gate_T1: torch.Tensor, weight_HI: torch.Tensor
) -> torch.Tensor:
    """Return routed + linear(silu(gate) * up, weight) * sigmoid(gate of the row).

    Shapes: routed [T, H], gate_up [T, 2 I] (gate, then up), gate [T, 1], weight [H, I] -> [T, H], dtype of routed;
    T at most SHARED_ROWS.
    Numerics: float32 inside; the hidden row, the product and the sum are each rounded once.
    """
    (rows, h), i = routed_TH.shape, weight_HI.shape[1]
    assert rows <= SHARED_ROWS, f"{rows} rows; a program makes the hidden rows of at most {SHARED_ROWS}"
    routed, gate_up, weight = rows_of(routed_TH), rows_of(gate_up_TI), rows_of(weight_HI)
    out_TH = torch.empty(rows, h, dtype=routed.dtype, device=routed.device)
    if rows:
        chosen = tile("shared_down_add", {"rows": rows, "n": h, "k": i, "bytes": weight.itemsize}, arch())
        strides = routed.stride(0), gate_up.stride(0), gate_T1.stride(0), weight.stride(0)
        operands = routed, gate_up, gate_T1, weight, out_TH, *strides, rows, h
        if "BM" in chosen:
            grid = (blocks(h, chosen["BN"]), blocks(rows, chosen["BM"]))
            dot = tl.float32 if weight.itemsize == 4 else tl.bfloat16
            shared_down_add_kernel[grid](*operands, WIDTH=i, DOT=dot, **chosen, **following())
        else:
            sizes = {"ROWS": triton.next_power_of_2(rows), "BLOCK": triton.next_power_of_2(i)}
            few_shared_down_add_kernel[(blocks(h, chosen["BN"]),)](*operands, WIDTH=i, **sizes, **chosen, **following())
    return out_TH


@triton.jit(do_not_specialize=["num_rows"])
def few_shared_down_add_kernel(
    routed_ptr,
    gate_up_ptr,
    gate_ptr,
    w_ptr,
    out_ptr,
    routed_stride,
    gate_up_stride,
    gate_stride,
    w_stride,
    num_rows,
    num_columns,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BN: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_begin(PDL)
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    at = tl.arange(0, BLOCK)
    w = whole_rows(w_ptr, w_stride, column, num_columns, WIDTH, BLOCK)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    wait_for_previous(PDL)
    inside, stored = at < WIDTH, column < num_columns
    for one in tl.static_range(ROWS):
        row = tl.minimum(one, num_rows - 1)  # where there are fewer, the last one comes again
        gate_at = gate_up_ptr + row * gate_up_stride + at
        gate = tl.load(gate_at, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gate_at + WIDTH, mask=inside, other=0.0).to(tl.float32)
        shared = times(w, (gate * tl.sigmoid(gate) * up).to(dtype)).to(dtype).to(tl.float32)
        opening = tl.sigmoid(tl.load(gate_ptr + row * gate_stride).to(tl.float32))
        routed = tl.load(routed_ptr + row * routed_stride + column, mask=stored, other=0.0).to(tl.float32)
        tl.store(out_ptr + row * num_columns + column, (routed + shared * opening).to(dtype), mask=stored)


@triton.jit(do_not_specialize=["num_rows"])
def shared_down_add_kernel(
    routed_ptr,
    gate_up_ptr,
    gate_ptr,
    w_ptr,
    out_ptr,
    routed_stride,
    gate_up_stride,
    gate_stride,
    w_stride,
    num_rows,
    num_columns,
    WIDTH: tl.constexpr,
    DOT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_begin(PDL)
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    row = (tl.program_id(1) * BM + tl.arange(0, BM)).to(tl.int64)
    live, inside = row < num_rows, column < num_columns
    w_rows = w_ptr + tl.minimum(column, num_columns - 1).to(tl.int64) * w_stride
    if PDL and WIDTH % 64 == 0:
        for first in tl.static_range(0, WIDTH, 64):
            ask_for(w_rows, first, 64)
    wait_for_previous(PDL)
    gate_rows = gate_up_ptr + row * gate_up_stride
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    total = tl.zeros((BN, BM), tl.float32)
    for k in range(0, WIDTH, BK):
        at = k + tl.arange(0, BK)
        there = live[None, :] & (at < WIDTH)[:, None]
        w = tl.load(w_rows[:, None] + at[None, :], mask=(at < WIDTH)[None, :], other=0.0)
        gate = tl.load(gate_rows[None, :] + at[:, None], mask=there, other=0.0).to(tl.float32)
        up = tl.load(gate_rows[None, :] + (WIDTH + at)[:, None], mask=there, other=0.0).to(tl.float32)
        hidden = (gate * tl.sigmoid(gate) * up).to(dtype)
        total = tl.dot(w.to(DOT), hidden.to(DOT), total, input_precision="ieee")
    opening = tl.sigmoid(tl.load(gate_ptr + row * gate_stride, mask=live, other=0.0).to(tl.float32))
    stored = live[None, :] & inside[:, None]
    routed = tl.load(routed_ptr + (row * routed_stride)[None, :] + column[:, None], mask=stored, other=0.0)
    out = routed.to(tl.float32) + total.to(dtype).to(tl.float32) * opening[None, :]
    tl.store(out_ptr + (row * num_columns)[None, :] + column[:, None], out.to(dtype), mask=stored)
