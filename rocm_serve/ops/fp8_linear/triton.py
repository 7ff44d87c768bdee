"""The matrix product with a block-FP8 weight, in Triton. Letters: T rows, K inner, N outer.

Two forms: one for all rows, and one for quantised rows and weights of whole blocks (triton_rows.py).
ops/tiles_fp8.py chooses.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rocm_serve.ops import tiles
from rocm_serve.ops.fp8 import BLOCK
from rocm_serve.ops.fp8_linear.triton_rows import many_rows, reads
from rocm_serve.ops.triton_common.triton import arch, dot_dtype, product, quantise_rows, rows_of

_BLOCK = tl.constexpr(BLOCK)
_FP8 = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e4m3fnuz: tl.float8e4b8}


def fp8_linear(x_TK: torch.Tensor, weight_NK: torch.Tensor, scale: torch.Tensor, *, activation: str) -> torch.Tensor:
    """Multiply rows with an FP8 weight: x @ (weight * scale).T.

    Shapes: x [T, K], weight FP8 [N, K], scale fp32 [ceil(N / 128), ceil(K / 128)] -> [T, N], dtype of x.
    Errors: ValueError for an activation other than "bf16" and "fp8_1x128".
    Numerics: as the reference. On sm_90 quantised rows meet weights of whole blocks by FP8 instructions, which keep 12
    to 13 bits of a sum (docs/numerics.md), others as bf16.
    """
    if activation not in ("bf16", "fp8_1x128"):
        raise ValueError(f"fp8_linear knows the activations bf16 and fp8_1x128, not {activation!r}")
    assert weight_NK.stride(1) == 1 and scale.is_contiguous(), "weights and scales are whole rows"
    quantised = activation == "fp8_1x128"
    (rows, k), n = x_TK.shape, weight_NK.shape[0]
    y_TN = torch.empty(rows, n, dtype=x_TK.dtype, device=x_TK.device)
    if not y_TN.numel():
        return y_TN
    x, x_scale = quantise_rows(x_TK, weight_NK.dtype) if quantised else (rows_of(x_TK), None)
    dot = dot_dtype(x_TK, weight_NK, arch(), quantised=quantised)
    shape = {"rows": rows, "n": n, "k": k, "bits": dot.primitive_bitwidth, "fp8": int(quantised)}
    tile = tiles.tile("fp8_linear", shape, arch())
    if tile["MANY"] and not reads(weight_NK, tile):
        tile = tiles.by_rule("fp8_linear", shape | {"fp8": 0}, arch())  # the form for all rows
    if tile["MANY"]:
        assert x_scale is not None, "the form for many rows takes FP8 rows"
        many_rows(x, x_scale, weight_NK, scale, y_TN, dot=dot if dot == tl.float32 else _FP8[x.dtype], tile=tile)
        return y_TN
    sizes = {name: size for name, size in tile.items() if name != "MANY"}
    fp8_linear_kernel[(triton.cdiv(rows, tile["BM"]), triton.cdiv(n, tile["BN"]))](
        x, x_scale, weight_NK, scale, y_TN, x.stride(0), weight_NK.stride(0), rows, n, K=k, DOT=dot, **sizes
    )
    return y_TN


@triton.jit(do_not_specialize=["num_rows"])
def fp8_linear_kernel(
    x_ptr,
    x_scale_ptr,
    w_ptr,
    w_scale_ptr,
    y_ptr,
    x_stride,
    w_stride,
    num_rows,
    num_columns,
    K: tl.constexpr,
    DOT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    scales: tl.constexpr = (K + _BLOCK - 1) // _BLOCK
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    wide = row.to(tl.int64)
    row_live, column_live = row < num_rows, column < num_columns
    x_scales = None
    if x_scale_ptr is not None:
        x_scales = x_scale_ptr + wide * scales
    w_rows = w_ptr + column.to(tl.int64) * w_stride
    w_scales = w_scale_ptr + (column // _BLOCK) * scales
    y = product(x_ptr + wide * x_stride, row_live, x_scales, w_rows, column_live, w_scales, K, BM, BN, BK, DOT)
    y_at = y_ptr + (wide * num_columns)[:, None] + column[None, :]
    tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=row_live[:, None] & column_live[None, :])
