"""The product of quantised rows with a block-FP8 weight, made for many, in Triton. Letters: T rows, K inner, N outer.

FP8 meets FP8 in the matrix units, 128 columns at a time; sums over blocks of 128 are float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from rocm_serve.ops.fp8 import BLOCK
from rocm_serve.ops.moe_experts.triton_grouped_tiles import add_block, rows_tile, weights_tile
from rocm_serve.ops.triton_common.triton import blocks

_BLOCK = tl.constexpr(BLOCK)


def reads(weight_NK: torch.Tensor, tile: Mapping[str, int]) -> bool:
    """Say whether a tile reads a weight where it lies: whole, or with DESC by rows of whole 16 bytes."""
    if tile["DESC"]:
        return weight_NK.data_ptr() % 16 == 0 and weight_NK.stride(0) % 16 == 0
    return weight_NK.is_contiguous()


def many_rows(
    x_TK: torch.Tensor,
    x_scale: torch.Tensor,
    weight_NK: torch.Tensor,
    scale: torch.Tensor,
    y_TN: torch.Tensor,
    *,
    dot: tl.dtype,
    tile: Mapping[str, int],
) -> None:
    """Multiply rows that `quantise_rows` made into `y_TN`. `tile`: see ops/tiles_fp8.py, with MANY; it `reads`."""
    (rows, k), n = x_TK.shape, weight_NK.shape[0]
    x: Any = x_TK.view(torch.uint8) if tile["REGS"] else x_TK
    w: Any = weight_NK
    if tile["DESC"]:
        assert k % 16 == 0, "the copy engine reads rows of whole 16 bytes"
        x = TensorDescriptor.from_tensor(x, [tile["BM"], tile["BK"]])
        w = TensorDescriptor.from_tensor(w, [tile["BN"], tile["BK"]])
    pieces = blocks(rows, tile["BM"]) * blocks(n, tile["BN"] * tile["PARTS"])
    fp8_rows_kernel[(min(tile["PROGRAMS"] or pieces, pieces),)](
        x,
        x_scale,
        w,
        scale,
        y_TN,
        rows,
        N=n,
        K=k,
        DOT=dot,
        DESC=bool(tile["DESC"]),
        FLAT=bool(tile["DESC"] and tile["PROGRAMS"]),
        **{name: tile[name] for name in ("GROUP", "PARTS", "BM", "BN", "BK", "num_warps", "num_stages")},
    )


@triton.jit
def piece_of(work, row_tiles, column_tiles: tl.constexpr, GROUP: tl.constexpr):
    """Return which tile of rows and which of columns: GROUP tiles of rows go down the columns side by side."""
    group = work // (GROUP * column_tiles)
    inside = work % (GROUP * column_tiles)
    size = tl.minimum(row_tiles - group * GROUP, GROUP)
    return group * GROUP + inside % size, inside // size


@triton.jit
def add_columns(
    y, x, x_scale, w, w_scale_ptr, first, k,
    N: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, DOT: tl.constexpr, DESC: tl.constexpr,
):  # fmt: skip
    """Add products with the weight's rows from `first` on to [BM, BN]; a row behind the last is taken as the last."""
    inside = tl.minimum(first + tl.arange(0, y.shape[1]), N - 1) - first
    w_tile = weights_tile(w, first, inside, k, K, BK, DESC)
    one_scale: tl.constexpr = N // _BLOCK * _BLOCK == N
    if one_scale:
        row = tl.minimum(first, N - 1)
    else:
        row = first + inside
    scales = w_scale_ptr + row // _BLOCK * ((K + _BLOCK - 1) // _BLOCK)
    return add_block(y, x, w_tile, x_scale, scales, k // _BLOCK, DOT, one_scale)


@triton.jit
def store_part(y_ptr, y, row, live, first, N: tl.constexpr):
    column = first + tl.arange(0, y.shape[1])
    at = y_ptr + (row.to(tl.int64) * N)[:, None] + column[None, :]
    tl.store(at, y.to(y_ptr.dtype.element_ty), mask=live[:, None] & (column < N)[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def fp8_rows_kernel(
    x, x_scale_ptr, w, w_scale_ptr, y_ptr, num_rows,
    N: tl.constexpr, K: tl.constexpr, DOT: tl.constexpr, DESC: tl.constexpr, FLAT: tl.constexpr,
    GROUP: tl.constexpr, PARTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Make tiles of BM rows by PARTS times BN columns, one after the other.

    With DESC both factors are descriptors, of tiles of [BM, BK] and [BN, BK]. FLAT: the two loops are made one, so that
    the next tile's factors are asked for while this one is multiplied.
    """
    row_tiles = (num_rows + BM - 1) // BM
    column_tiles: tl.constexpr = (N + BN * PARTS - 1) // (BN * PARTS)
    for work in tl.range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0), flatten=FLAT):
        row_tile, column_tile = piece_of(work, row_tiles, column_tiles, GROUP)
        row = row_tile * BM + tl.arange(0, BM)
        live = row < num_rows
        held = tl.minimum(row, num_rows - 1).to(tl.int64)
        first = column_tile * (BN * PARTS)
        x_scales = x_scale_ptr + held * ((K + _BLOCK - 1) // _BLOCK)
        y0 = tl.zeros((BM, BN), tl.float32)
        y1, y2, y3 = y0, y0, y0
        for k in tl.range(0, K, BK):
            if DESC:
                rows = x.load([row_tile * BM, k])
            else:
                rows = rows_tile(x + held * K, k, K, BK)
            x_scale = tl.load(x_scales + k // _BLOCK)
            y0 = add_columns(y0, rows, x_scale, w, w_scale_ptr, first, k, N, K, BK, DOT, DESC)
            if PARTS > 1:
                y1 = add_columns(y1, rows, x_scale, w, w_scale_ptr, first + BN, k, N, K, BK, DOT, DESC)
            if PARTS > 2:
                y2 = add_columns(y2, rows, x_scale, w, w_scale_ptr, first + 2 * BN, k, N, K, BK, DOT, DESC)
                y3 = add_columns(y3, rows, x_scale, w, w_scale_ptr, first + 3 * BN, k, N, K, BK, DOT, DESC)
        store_part(y_ptr, y0, row, live, first, N)
        if PARTS > 1:
            store_part(y_ptr, y1, row, live, first + BN, N)
        if PARTS > 2:
            store_part(y_ptr, y2, row, live, first + 2 * BN, N)
            store_part(y_ptr, y3, row, live, first + 3 * BN, N)
