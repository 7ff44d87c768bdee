"""An output gate in Triton. Letters: T rows, H width, or heads of D."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rocm_serve.ops.triton_common.triton import begin, blocks, following, part_row_tile, rows_of


def sigmoid_mul(x_TH: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Return x * sigmoid(gate).

    Shapes: x [T, H], gate [T, H], or [T, 1] for one gate a row -> [T, H]; or x, gate [T, H, D] -> [T, H, D].
    The result has the dtype of x.
    Rows, and of a gate heads, may lie apart: the gate beside each query head is read where the projection left it.
    """
    if gate.dim() == 3 and gate.stride(2) == 1:
        x, gates = rows_of(x_TH.flatten(1)), gate.shape[2]
        strides = gate.stride(0), gate.stride(1)
    else:
        x, gate = rows_of(x_TH), rows_of(gate)
        gates, strides = gate.shape[1], (gate.stride(0), 0)
    y = torch.empty_like(x_TH, memory_format=torch.contiguous_format)
    if y.numel():
        rows, width = x.shape
        tile = part_row_tile(width)
        grid = (blocks(rows, tile["ROWS"]), blocks(width, tile["BLOCK"]))
        sigmoid_mul_kernel[grid](
            x, gate, y, x.stride(0), *strides, rows, WIDTH=width, GATES=gates, **tile, **following()
        )
    return y


@triton.jit(do_not_specialize=["num_rows"])
def sigmoid_mul_kernel(
    x_ptr, gate_ptr, y_ptr, x_stride, gate_stride, head_stride, num_rows,
    WIDTH: tl.constexpr, GATES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Some columns of some rows. GATES: those of a head, which lie together; 1 for one gate a row."""
    begin(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wide = row.to(tl.int64)
    live = (row < num_rows)[:, None] & (column < WIDTH)[None, :]
    x = tl.load(x_ptr + (wide * x_stride)[:, None] + column[None, :], mask=live, other=0.0).to(tl.float32)
    if GATES == 1 and WIDTH > 1:
        gate = tl.load(gate_ptr + wide * gate_stride, mask=row < num_rows, other=0.0).to(tl.float32)[:, None]
    else:
        at = (column // GATES * head_stride + column % GATES)[None, :]
        gate = tl.load(gate_ptr + (wide * gate_stride)[:, None] + at, mask=live, other=0.0).to(tl.float32)
    y = x * tl.sigmoid(gate)
    tl.store(y_ptr + (wide * WIDTH)[:, None] + column[None, :], y.to(y_ptr.dtype.element_ty), mask=live)
