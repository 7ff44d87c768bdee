"""RMS norm in Triton, and its form with the residual add. Letters: T rows, H width."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rocm_serve.ops.triton_common.triton import begin, blocks, following, rows_of, whole_row_tile


def rms_norm(x_TH: torch.Tensor, weight_H: torch.Tensor, *, eps: float, plus_one: bool) -> torch.Tensor:
    """Normalise each row by its root mean square and scale it. Shapes: x [..., H], weight [H] -> [..., H]."""
    x = rows_of(x_TH)
    y_TH = torch.empty_like(x_TH, memory_format=torch.contiguous_format)
    _launch(x, None, weight_H, y_TH, eps, plus_one)
    return y_TH


def add_rms_norm(
    x_TH: torch.Tensor, residual_TH: torch.Tensor, weight_H: torch.Tensor, *, eps: float, plus_one: bool
) -> torch.Tensor:
    """Add `x` to the residual stream in place and return the norm of the sum. Shapes: x, residual [T, H] -> [T, H]."""
    assert residual_TH.stride(-1) == 1, "the residual stream is written in place: its rows must be contiguous"
    y_TH = torch.empty_like(residual_TH, memory_format=torch.contiguous_format)
    _launch(rows_of(x_TH), residual_TH, weight_H, y_TH, eps, plus_one)
    return y_TH


def _launch(
    x_TH: torch.Tensor,
    residual_TH: torch.Tensor | None,
    weight_H: torch.Tensor,
    y: torch.Tensor,
    eps: float,
    plus_one: bool,
) -> None:
    rows, width = x_TH.shape
    if not rows:
        return
    tile = whole_row_tile(width)
    rms_norm_kernel[(blocks(rows, tile["ROWS"]),)](
        x_TH,
        residual_TH,
        weight_H,
        y,
        x_TH.stride(0),
        0 if residual_TH is None else residual_TH.stride(0),
        rows,
        eps,
        WIDTH=width,
        PLUS_ONE=plus_one,
        **tile,
        **following(),
    )


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    x_stride,
    residual_stride,
    num_rows,
    eps,
    WIDTH: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    wide = row.to(tl.int64)
    live = (row < num_rows)[:, None] & (column < WIDTH)[None, :]
    x = tl.load(x_ptr + (wide * x_stride)[:, None] + column[None, :], mask=live, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        stream = residual_ptr + (wide * residual_stride)[:, None] + column[None, :]
        total = (x + tl.load(stream, mask=live, other=0.0).to(tl.float32)).to(residual_ptr.dtype.element_ty)
        tl.store(stream, total, mask=live)
        x = total.to(tl.float32)
    scale = tl.load(weight_ptr + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    if PLUS_ONE:
        scale += 1.0
    y = x * tl.rsqrt(tl.sum(x * x, 1) / WIDTH + eps)[:, None] * scale[None, :]
    tl.store(y_ptr + (wide * WIDTH)[:, None] + column[None, :], y.to(y_ptr.dtype.element_ty), mask=live)
