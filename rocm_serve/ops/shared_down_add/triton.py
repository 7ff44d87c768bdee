"""A shared expert from its gate and up on, and the sum with the routed ones, in one launch.

Every program has some rows of the weight on the way before it waits, and makes the hidden row for itself, as that of
ops/add_norm_linear makes a norm. Letters: T rows, I its width, H width; in kernels, BN rows of a weight, ROWS those of
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


def shared_down_add(
    routed_TH: torch.Tensor, gate_up_TI: torch.Tensor, gate_T1: torch.Tensor, weight_HI: torch.Tensor
) -> torch.Tensor:
    """Return routed + linear(silu(gate) * up, weight) * sigmoid(gate of the row).

    Shapes: routed [T, H], gate_up [T, 2 I] (gate, then up), gate [T, 1], weight [H, I] -> [T, H], dtype of routed;
    T at most FOLDED_ROWS.
    Numerics: float32 inside; the hidden row, the product and the sum are each rounded once.
    """
    (rows, width), (h, i) = routed_TH.shape, weight_HI.shape
    assert rows <= FOLDED_ROWS, f"{rows} rows; a program makes the hidden rows of at most {FOLDED_ROWS}"
    routed, gate_up, weight = rows_of(routed_TH), rows_of(gate_up_TI), rows_of(weight_HI)
    out_TH = torch.empty(rows, width, dtype=routed.dtype, device=routed.device)
    if rows:
        chosen = tile("shared_down_add", {"rows": rows, "n": h, "k": i, "bytes": weight.itemsize}, arch())
        shared_down_add_kernel[(blocks(h, chosen["BN"]),)](
            routed,
            gate_up,
            gate_T1,
            weight,
            out_TH,
            routed.stride(0),
            gate_up.stride(0),
            gate_T1.stride(0),
            weight.stride(0),
            rows,
            h,
            WIDTH=i,
            ROWS=triton.next_power_of_2(rows),
            BLOCK=triton.next_power_of_2(i),
            **chosen,
            **following(),
        )
    return out_TH


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
