"""The plain matrix product of few rows, in Triton: its time is that of reading the weight.

Two forms. One row is multiplied and added in place, by programs that have all their rows of the weight on the way
before they wait for the row. Several rows stand on the right of matrix instructions, which take 16 of them or more
there and need 64 on the left; the inner columns may be cut among programs, the last of which adds up their parts.
Products that make their rows on the way (ops/add_norm_linear, ops/shared_down_add) hold whole rows of the weight.

Letters: T rows, K inner, N outer; in kernels, BM rows of a tile, BN rows of a weight, BK columns at a time.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from rocm_serve.ops.triton_common.triton import Counters, blocks, following, let_next_begin, wait_for_previous

_arrived = Counters()
_LINE = tl.constexpr(128)  # bytes of L2 that are asked for at once


def few_rows(
    x_TK: torch.Tensor, weight_NK: torch.Tensor, y_TN: torch.Tensor, dot: tl.dtype, tile: Mapping[str, int]
) -> None:
    """Compute x @ weight.T into `y_TN`. `tile`: one with FEW, see ops/tiles_linear.py."""
    (rows, k), n = x_TK.shape, weight_NK.shape[0]
    how = {"num_warps": tile["num_warps"], "num_stages": tile["num_stages"], **following()}
    strides = x_TK.stride(0), weight_NK.stride(0)
    if not tile["BM"]:
        grid = (blocks(n, tile["BN"]), rows)
        one_row_kernel[grid](x_TK, weight_NK, y_TN, *strides, n, K=k, BN=tile["BN"], BK=tile["BK"], **how)
        return
    splits = tile["SPLITS"]
    grid = (blocks(n, tile["BN"]), blocks(rows, tile["BM"]), splits)
    parts = arrived = None
    if splits > 1:
        parts = torch.empty(splits, rows, n, dtype=torch.float32, device=x_TK.device)
        arrived = _arrived.of(grid[0] * grid[1], x_TK.device)
    sizes = {name: tile[name] for name in ("BM", "BN", "BK", "SPLITS", "AHEAD")}
    weight_left_kernel[grid](x_TK, weight_NK, y_TN, parts, arrived, *strides, rows, n, K=k, DOT=dot, **sizes, **how)


@triton.jit
def one_row_kernel(
    x_ptr,
    w_ptr,
    y_ptr,
    x_stride,
    w_stride,
    num_columns,
    K: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply one row with BN rows of the weight."""
    let_next_begin(PDL)
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    row = tl.program_id(1).to(tl.int64)
    at = tl.arange(0, BK)
    w_at = w_ptr + (tl.minimum(column, num_columns - 1).to(tl.int64) * w_stride)[:, None] + at[None, :]
    x_at = x_ptr + row * x_stride + at
    if BK <= K:
        w = tl.load(w_at)
    else:
        w = tl.load(w_at, mask=(at < K)[None, :], other=0.0)
    wait_for_previous(PDL)
    x = tl.load(x_at, mask=at < K, other=0.0).to(tl.float32)
    total = w.to(tl.float32) * x[None, :]
    for k in tl.static_range(BK, K, BK):
        if k + BK <= K:
            w = tl.load(w_at + k)
            x = tl.load(x_at + k).to(tl.float32)
        else:
            w = tl.load(w_at + k, mask=(at < K - k)[None, :], other=0.0)
            x = tl.load(x_at + k, mask=at < K - k, other=0.0).to(tl.float32)
        total += w.to(tl.float32) * x[None, :]
    y = tl.sum(total, 1)
    tl.store(y_ptr + row * num_columns + column, y.to(y_ptr.dtype.element_ty), mask=column < num_columns)


@triton.jit
def ask_for(w_rows, first, COLUMNS: tl.constexpr):
    """Have COLUMNS of some rows of the weight brought to L2, from column `first` on; NVIDIA's instruction."""
    step: tl.constexpr = _LINE // (w_rows.dtype.element_ty.primitive_bitwidth // 8)
    line = tl.arange(0, COLUMNS // step) * step
    at = (w_rows[:, None] + (first + line)[None, :]).to(tl.int64)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit(do_not_specialize=["num_rows"])
def weight_left_kernel(
    x_ptr,
    w_ptr,
    y_ptr,
    parts_ptr,
    arrived_ptr,
    x_stride,
    w_stride,
    num_rows,
    num_columns,
    K: tl.constexpr,
    DOT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SPLITS: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply BN rows of the weight with BM rows along a part of K. AHEAD: columns asked for before the rows are."""
    let_next_begin(PDL)
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    row = tl.program_id(1) * BM + tl.arange(0, BM)
    split = tl.program_id(2)
    live, inside = row < num_rows, column < num_columns
    w_rows = w_ptr + tl.minimum(column, num_columns - 1).to(tl.int64) * w_stride
    x_rows = x_ptr + row.to(tl.int64) * x_stride
    part: tl.constexpr = (K + SPLITS * BK - 1) // (SPLITS * BK) * BK
    first = split * part
    if PDL and AHEAD > 0:
        ask_for(w_rows, first, AHEAD)
    wait_for_previous(PDL)
    total = tl.zeros((BN, BM), tl.float32)
    for k in range(first, tl.minimum(first + part, K), BK):
        at = k + tl.arange(0, BK)
        if K % BK == 0:
            w = tl.load(w_rows[:, None] + at[None, :])
            x = tl.load(x_rows[None, :] + at[:, None], mask=live[None, :], other=0.0)
        else:
            w = tl.load(w_rows[:, None] + at[None, :], mask=(at < K)[None, :], other=0.0)
            x = tl.load(x_rows[None, :] + at[:, None], mask=live[None, :] & (at < K)[:, None], other=0.0)
        total = tl.dot(w.to(DOT), x.to(DOT), total, input_precision="ieee")
    stored = live[None, :] & inside[:, None]
    to = (row.to(tl.int64) * num_columns)[None, :] + column[:, None]
    if SPLITS == 1:
        tl.store(y_ptr + to, total.to(y_ptr.dtype.element_ty), mask=stored)
    else:
        size = num_rows.to(tl.int64) * num_columns
        tl.store(parts_ptr + split * size + to, total, mask=stored)
        tl.debug_barrier()
        counter = arrived_ptr + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        if tl.atomic_add(counter, 1, sem="acq_rel") == SPLITS - 1:
            total = tl.zeros((BN, BM), tl.float32)
            for one in tl.static_range(SPLITS):  # always in this order, whichever program came last
                total += tl.load(parts_ptr + one * size + to, mask=stored, other=0.0, cache_modifier=".cg")
            tl.store(y_ptr + to, total.to(y_ptr.dtype.element_ty), mask=stored)
            tl.store(counter, 0)


@triton.jit
def whole_rows(w_ptr, w_stride, column, num_columns, K: tl.constexpr, BLOCK: tl.constexpr):
    """Load rows `column` of a weight [BN, BLOCK], whole: the last one where there are none, zeros behind K."""
    at = tl.arange(0, BLOCK)
    w_at = w_ptr + (tl.minimum(column, num_columns - 1).to(tl.int64) * w_stride)[:, None] + at[None, :]
    if K == BLOCK:
        w = tl.load(w_at)
    else:
        w = tl.load(w_at, mask=(at < K)[None, :], other=0.0)
    return w


@triton.jit
def times(w, row):
    """Multiply rows of a weight [BN, BLOCK] with one row [BLOCK], as it is rounded: float32 [BN]."""
    return tl.sum(w.to(tl.float32) * row.to(tl.float32)[None, :], 1)
