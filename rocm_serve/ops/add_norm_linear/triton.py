"""What a layer adds to the residual stream, its norm, and the product of that, in one launch.

Every program has some rows of the weight on the way before it waits for the rows, and makes the norm of each row for
itself: a row is short beside the weights, and a launch takes longer than the norm. The first program writes it down.

Letters: T rows, H width, N outer; in kernels, BN rows of a weight, ROWS those of
the step, rounded up to a power of two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rocm_serve.ops.linear.triton_few import times, whole_rows
from rocm_serve.ops.tiles import tile
from rocm_serve.ops.tiles_linear import FOLDED_ROWS
from rocm_serve.ops.triton_common.triton import (
    arch,
    blocks,
    following,
    let_next_begin,
    rows_of,
    wait_for_previous,
)


def add_norm_linear(
    x_TH: torch.Tensor,
    residual_TH: torch.Tensor,
    norm_weight_H: torch.Tensor,
    weight_NH: torch.Tensor,
    total_TH: torch.Tensor,
    *,
    eps: float,
    plus_one: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return linear(norm, weight) and the norm itself, where norm = rms_norm(x + residual).

    Shapes: x, residual, total [T, H], norm_weight [H], weight [N, H] -> [T, N] and [T, H], T at most FOLDED_ROWS.
    `total` holds x + residual afterwards; it is other memory than x and residual, which other programs still read.
    Numerics: float32 inside; the sum, the norm and the product are each rounded once.
    """
    (rows, width), n = x_TH.shape, weight_NH.shape[0]
    assert rows <= FOLDED_ROWS, f"{rows} rows; a program makes the norm of at most {FOLDED_ROWS}"
    assert total_TH.stride(-1) == 1, "the residual stream is written here: its rows must be contiguous"
    x, residual, weight = rows_of(x_TH), rows_of(residual_TH), rows_of(weight_NH)
    y_TN = torch.empty(rows, n, dtype=x.dtype, device=x.device)
    normed_TH = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    if rows:
        chosen = tile("add_norm_linear", {"rows": rows, "n": n, "k": width, "bytes": weight.itemsize}, arch())
        add_norm_linear_kernel[(blocks(n, chosen["BN"]),)](
            x,
            residual,
            norm_weight_H,
            weight,
            y_TN,
            normed_TH,
            total_TH,
            x.stride(0),
            residual.stride(0),
            weight.stride(0),
            total_TH.stride(0),
            rows,
            n,
            eps,
            WIDTH=width,
            PLUS_ONE=plus_one,
            ROWS=triton.next_power_of_2(rows),
            BLOCK=triton.next_power_of_2(width),
            **chosen,
            **following(),
        )
    return y_TN, normed_TH


@triton.jit(do_not_specialize=["num_rows"])
def add_norm_linear_kernel(
    x_ptr,
    residual_ptr,
    norm_weight_ptr,
    w_ptr,
    y_ptr,
    normed_ptr,
    total_ptr,
    x_stride,
    residual_stride,
    w_stride,
    total_stride,
    num_rows,
    num_columns,
    eps,
    WIDTH: tl.constexpr,
    PLUS_ONE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BN: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_begin(PDL)
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    at = tl.arange(0, BLOCK)
    w = whole_rows(w_ptr, w_stride, column, num_columns, WIDTH, BLOCK)
    scale = tl.load(norm_weight_ptr + at, mask=at < WIDTH, other=0.0).to(tl.float32)
    if PLUS_ONE:
        scale += 1.0
    wait_for_previous(PDL)
    inside = at < WIDTH
    for one in tl.static_range(ROWS):
        row = tl.minimum(one, num_rows - 1)  # where there are fewer, the last one comes again
        x = tl.load(x_ptr + row * x_stride + at, mask=inside, other=0.0).to(tl.float32)
        before = tl.load(residual_ptr + row * residual_stride + at, mask=inside, other=0.0).to(tl.float32)
        total = (x + before).to(total_ptr.dtype.element_ty)
        x = total.to(tl.float32)
        normed = (x * tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps) * scale).to(normed_ptr.dtype.element_ty)
        if tl.program_id(0) == 0:
            tl.store(total_ptr + row * total_stride + at, total, mask=inside)
            tl.store(normed_ptr + row * WIDTH + at, normed, mask=inside)
        y = times(w, normed).to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + row * num_columns + column, y, mask=column < num_columns)
