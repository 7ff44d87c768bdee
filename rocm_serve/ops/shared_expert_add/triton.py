"""What a shared expert adds to the routed ones, in Triton. Letters: T rows, H width."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rocm_serve.ops.triton_common.triton import begin, following, rows_of

_FEW_ROWS = 64  # of which a program has some columns only, and each multiplies the whole row with the gate's weight


def shared_expert_add(
    routed_TH: torch.Tensor, shared_TH: torch.Tensor, x_TH: torch.Tensor, gate_weight_1H: torch.Tensor
) -> torch.Tensor:
    """Return routed + shared * sigmoid(x . gate_weight), one gate a row.

    Shapes: routed, shared and x [T, H], gate_weight [1, H] -> [T, H], dtype of x.
    Numerics: fp32 inside, one rounding.
    """
    routed, shared, x = rows_of(routed_TH), rows_of(shared_TH), rows_of(x_TH)
    rows, width = x.shape
    out_TH = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    if out_TH.numel():
        deep = min(triton.next_power_of_2(width), 2048)
        block = min(deep, 512) if rows <= _FEW_ROWS else deep
        columns = block if rows <= _FEW_ROWS else triton.cdiv(width, block) * block
        shared_expert_add_kernel[(rows, triton.cdiv(width, columns))](
            routed,
            shared,
            x,
            gate_weight_1H.contiguous(),
            out_TH,
            routed.stride(0),
            shared.stride(0),
            x.stride(0),
            WIDTH=width,
            DEEP=deep,
            COLUMNS=columns,
            BLOCK=block,
            num_warps=max(1, deep // 512),
            **following(),
        )
    return out_TH


@triton.jit
def shared_expert_add_kernel(
    routed_ptr,
    shared_ptr,
    x_ptr,
    gate_ptr,
    out_ptr,
    routed_stride,
    shared_stride,
    x_stride,
    WIDTH: tl.constexpr,
    DEEP: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    products = tl.zeros((DEEP,), tl.float32)
    for first in tl.static_range(0, WIDTH, DEEP):
        column = first + tl.arange(0, DEEP)
        x = tl.load(x_ptr + row * x_stride + column, mask=column < WIDTH, other=0.0).to(tl.float32)
        gate = tl.load(gate_ptr + column, mask=column < WIDTH, other=0.0).to(tl.float32)
        products += x * gate
    opening = tl.sigmoid(tl.sum(products, 0))
    for first in tl.static_range(0, COLUMNS, BLOCK):
        column = tl.program_id(1) * COLUMNS + first + tl.arange(0, BLOCK)
        inside = column < WIDTH
        routed = tl.load(routed_ptr + row * routed_stride + column, mask=inside, other=0.0).to(tl.float32)
        shared = tl.load(shared_ptr + row * shared_stride + column, mask=inside, other=0.0).to(tl.float32)
        y = routed + shared * opening
        tl.store(out_ptr + row * WIDTH + column, y.to(out_ptr.dtype.element_ty), mask=inside)
