"""An output gate in Triton. Letters: T rows, H width."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rocm_serve.ops.triton_common.triton import part_row_tile, rows_of


def sigmoid_mul(x_TH: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Return x * sigmoid(gate). Shapes: x [T, H], gate [T, H], or [T, 1] for one gate a row -> [T, H], dtype of x."""
    x, opening = rows_of(x_TH), rows_of(gate)
    rows, width = x.shape
    y_TH = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    if y_TH.numel():
        tile = part_row_tile(width)
        grid = (triton.cdiv(rows, tile["ROWS"]), triton.cdiv(width, tile["BLOCK"]))
        sigmoid_mul_kernel[grid](
            x, opening, y_TH, x.stride(0), opening.stride(0), rows, WIDTH=width, GATES=opening.shape[1], **tile
        )
    return y_TH


@triton.jit(do_not_specialize=["num_rows"])
def sigmoid_mul_kernel(
    x_ptr,
    gate_ptr,
    y_ptr,
    x_stride,
    gate_stride,
    num_rows,
    WIDTH: tl.constexpr,
    GATES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wide = row.to(tl.int64)
    live = (row < num_rows)[:, None] & (column < WIDTH)[None, :]
    x = tl.load(x_ptr + (wide * x_stride)[:, None] + column[None, :], mask=live, other=0.0).to(tl.float32)
    if GATES == 1:
        gate = tl.load(gate_ptr + wide * gate_stride, mask=row < num_rows, other=0.0).to(tl.float32)[:, None]
    else:
        gate = tl.load(gate_ptr + (wide * gate_stride)[:, None] + column[None, :], mask=live, other=0.0).to(tl.float32)
    y = x * tl.sigmoid(gate)
    tl.store(y_ptr + (wide * WIDTH)[:, None] + column[None, :], y.to(y_ptr.dtype.element_ty), mask=live)
