"""The activation of a gated MLP, in Triton. Letters: T rows, I width of the MLP."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rocm_serve.ops.triton_common.triton import begin, blocks, following, part_row_tile, rows_of


def silu_mul(gate_up_TI: torch.Tensor) -> torch.Tensor:
    """Return silu(first half) * second half of each row. Shapes: [T, 2 I] (gate, then up) -> [T, I], same dtype."""
    x = rows_of(gate_up_TI)
    rows, width = x.shape[0], x.shape[1] // 2
    y_TI = torch.empty(*gate_up_TI.shape[:-1], width, dtype=x.dtype, device=x.device)
    if y_TI.numel():
        tile = part_row_tile(width)
        grid = (blocks(rows, tile["ROWS"]), blocks(width, tile["BLOCK"]))
        silu_mul_kernel[grid](x, y_TI, x.stride(0), rows, WIDTH=width, **tile, **following())
    return y_TI


@triton.jit(do_not_specialize=["num_rows"])
def silu_mul_kernel(
    x_ptr, y_ptr, x_stride, num_rows,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wide = row.to(tl.int64)
    live = (row < num_rows)[:, None] & (column < WIDTH)[None, :]
    gate_at = x_ptr + (wide * x_stride)[:, None] + column[None, :]
    gate = tl.load(gate_at, mask=live, other=0.0).to(tl.float32)
    up = tl.load(gate_at + WIDTH, mask=live, other=0.0).to(tl.float32)
    y = gate * tl.sigmoid(gate) * up
    tl.store(y_ptr + (wide * WIDTH)[:, None] + column[None, :], y.to(y_ptr.dtype.element_ty), mask=live)
