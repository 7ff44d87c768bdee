"""The plain matrix product on a GPU. Letters: T rows, K inner, N outer."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rocm_serve.ops.linear.triton_few import few_rows
from rocm_serve.ops.linear.vendor import linear as by_vendor
from rocm_serve.ops.tiles import tile
from rocm_serve.ops.triton_common.triton import arch, blocks, dot_dtype, product, rows_of


def linear(x_TK: torch.Tensor, weight_NK: torch.Tensor, *, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """Multiply rows with a weight: x @ weight.T.

    Shapes: x [T, K], weight [N, K] -> [T, N], dtype of x or `out_dtype`. A tile chooses among kernels for few rows,
    for many, and the library that torch calls.
    Numerics: float32 sums, one rounding. A row's bits depend on that row and the tile alone; the library's may depend
    on how many rows there are.
    """
    (rows, k), n = x_TK.shape, weight_NK.shape[0]
    if not rows * n:
        return x_TK.new_empty(rows, n, dtype=out_dtype or x_TK.dtype)
    here = arch()
    # float32 on either side: both are widened
    dot = dot_dtype(x_TK if x_TK.dtype.itemsize == 4 else weight_NK, weight_NK, here, quantised=False)
    chosen = tile("linear", {"rows": rows, "n": n, "k": k, "bytes": 4 if dot == tl.float32 else 2}, here)
    if chosen.get("VENDOR"):
        return by_vendor(x_TK, weight_NK, out_dtype=out_dtype)
    x, weight = rows_of(x_TK), rows_of(weight_NK)
    y_TN = torch.empty(rows, n, dtype=out_dtype or x.dtype, device=x.device)
    if chosen.get("FEW"):
        few_rows(x, weight, y_TN, dot, chosen)
    else:
        linear_kernel[(blocks(rows, chosen["BM"]), blocks(n, chosen["BN"]))](
            x, weight, y_TN, x.stride(0), weight.stride(0), rows, n, K=k, DOT=dot, **chosen
        )
    return y_TN


@triton.jit(do_not_specialize=["num_rows"])
def linear_kernel(
    x_ptr,
    w_ptr,
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
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    wide = row.to(tl.int64)
    row_live, column_live = row < num_rows, column < num_columns
    w_rows = w_ptr + column.to(tl.int64) * w_stride
    y = product(x_ptr + wide * x_stride, row_live, None, w_rows, column_live, None, K, BM, BN, BK, DOT)
    y_at = y_ptr + (wide * num_columns)[:, None] + column[None, :]
    tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=row_live[:, None] & column_live[None, :])
