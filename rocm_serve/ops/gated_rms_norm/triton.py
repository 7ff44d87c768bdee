"""The norm at the output of Gated DeltaNet, in Triton. Letters: T rows, H value heads, D value head size."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rocm_serve.ops.triton_common.triton import begin, blocks, following, whole_row_tile


def gated_rms_norm(
    x_THD: torch.Tensor, gate_THD: torch.Tensor, weight_D: torch.Tensor, *, eps: float, activation: str
) -> torch.Tensor:
    """Normalise each head, scale it, then gate it.

    Shapes: x, gate [T, H, D], weight [D] (used as it is, not 1 + w) -> [T, H, D], dtype of the gate.
    Errors: ValueError for an activation other than "silu" and "sigmoid".
    """
    if activation not in ("silu", "sigmoid"):
        raise ValueError(f"gated_rms_norm knows the activations silu and sigmoid, not {activation!r}")
    t, heads, width = x_THD.shape
    x, gate = (z if z.stride(-1) == 1 else z.contiguous() for z in (x_THD, gate_THD))
    y_THD = torch.empty_like(gate, memory_format=torch.contiguous_format)
    if y_THD.numel():
        tile = whole_row_tile(width)
        gated_rms_norm_kernel[(blocks(t * heads, tile["ROWS"]),)](
            x,
            gate,
            weight_D,
            y_THD,
            x.stride(0),
            x.stride(1),
            gate.stride(0),
            gate.stride(1),
            t * heads,
            eps,
            HEADS=heads,
            WIDTH=width,
            SILU=activation == "silu",
            **tile,
            **following(),
        )
    return y_THD


@triton.jit(do_not_specialize=["num_heads"])
def gated_rms_norm_kernel(
    x_ptr,
    gate_ptr,
    weight_ptr,
    y_ptr,
    x_row_stride,
    x_head_stride,
    gate_row_stride,
    gate_head_stride,
    num_heads,
    eps,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    SILU: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row, head = (at // HEADS).to(tl.int64), at % HEADS
    column = tl.arange(0, BLOCK)
    live = (at < num_heads)[:, None] & (column < WIDTH)[None, :]
    x_at = (row * x_row_stride + head * x_head_stride)[:, None] + column[None, :]
    gate_at = (row * gate_row_stride + head * gate_head_stride)[:, None] + column[None, :]
    x = tl.load(x_ptr + x_at, mask=live, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + gate_at, mask=live, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x, 1) / WIDTH + eps)[:, None] * weight[None, :]
    opened = tl.sigmoid(gate)
    if SILU:
        opened *= gate
    y_at = (at.to(tl.int64) * WIDTH)[:, None] + column[None, :]
    tl.store(y_ptr + y_at, (normed * opened).to(y_ptr.dtype.element_ty), mask=live)
