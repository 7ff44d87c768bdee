"""What the kernels of the experts of many rows share: tiles of rows and weights, their products, their quantisation.

See triton_grouped.py. BM choices of a tile, BN rows of a weight, BK of K columns of both at a time. A weight is a
pointer, or with DESC a descriptor of all experts' rows one below the other, in tiles of [BN, BK], which the card's copy
engine reads.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rocm_serve.ops.fp8 import AMAX_FLOOR, BLOCK

_BLOCK = tl.constexpr(BLOCK)
_AMAX_FLOOR = tl.constexpr(AMAX_FLOOR)


@triton.jit
def divided(x, divisor, inverse):
    """Return the quotient as IEEE rounds it, by a product put right by what it leaves over; no subnormal numbers."""
    about = x * inverse
    return tl.fma(tl.fma(-about, divisor, x), inverse, about)


@triton.jit
def half_empty(choices_ptr, num_choices, SHORT: tl.constexpr, BM: tl.constexpr):
    """Return 1 for a tile that is at most half full, if that is asked for, else 0."""
    half = 0
    if SHORT:
        half = (tl.load(choices_ptr + BM // 2) >= num_choices).to(tl.int32)
    return half


@triton.jit
def largest_of(x):
    """Return the largest magnitude of each row, compared as integers: a NaN is the largest."""
    return tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)


@triton.jit
def multiplier_of(largest, TOP: tl.constexpr):
    """Return the multiplier of rows whose largest magnitude that is, and its reciprocal."""
    size = largest.to(tl.float32, bitcast=True)
    top = tl.full(size.shape, TOP, tl.float32)
    scale = divided(tl.where(size < _AMAX_FLOOR, _AMAX_FLOOR, size), top, 1.0 / TOP)
    inverse = 1.0 / scale
    return scale, tl.fma(tl.fma(-inverse, scale, tl.full(scale.shape, 1.0, tl.float32)), inverse, inverse)


@triton.jit
def codes_of(x, scale, inverse, TOP: tl.constexpr, dtype: tl.constexpr):
    """Quantise rows with their multipliers, as quantise_tile does, without its divisions.

    On NVIDIA an IEEE division is a call of a function, which takes registers from the whole kernel.
    """
    scaled = divided(x, tl.broadcast_to(scale[:, None], x.shape), tl.broadcast_to(inverse[:, None], x.shape))
    return tl.where(scaled > TOP, TOP, tl.where(scaled < -TOP, -TOP, scaled)).to(dtype)


@triton.jit
def rows_tile(rows, k, K: tl.constexpr, BK: tl.constexpr):
    """Read [rows, BK]. `rows` point to where each begins."""
    at = k + tl.arange(0, BK)
    if K % BK == 0:
        x = tl.load(rows[:, None] + at[None, :])
    else:
        x = tl.load(rows[:, None] + at[None, :], mask=(at < K)[None, :], other=0.0)
    return x


@triton.jit
def weights_tile(w, first, inside, k, K: tl.constexpr, BK: tl.constexpr, DESC: tl.constexpr):
    """Read [BK, BN] of the weight's rows `first + inside`."""
    if DESC:
        tile = w.load([first, k]).T
    else:
        at = tl.arange(0, BK)[:, None]
        tiles = w + first.to(tl.int64) * K + k + (inside[None, :] * K + at)
        if K % BK == 0:
            tile = tl.load(tiles)
        else:
            tile = tl.load(tiles, mask=k + at < K, other=0.0)
    return tile


@triton.jit
def scales_of(w_scale_ptr, expert, first, inside, ROWS: tl.constexpr, K: tl.constexpr, ONE_SCALE: tl.constexpr):
    """Point to the multipliers of the weight's rows `first + inside`, of ROWS for each expert; one for all, if so.

    None where a weight has none.
    """
    blocks: tl.constexpr = (K + _BLOCK - 1) // _BLOCK
    if w_scale_ptr is None:
        scales = None
    else:
        own = w_scale_ptr + expert.to(tl.int64) * ((ROWS + _BLOCK - 1) // _BLOCK * blocks)
        if ONE_SCALE:
            scales = own + first // _BLOCK * blocks
        else:
            scales = own + (first + inside) // _BLOCK * blocks
    return scales


@triton.jit
def row_scales(scale_ptr, row, K: tl.constexpr):
    """Point to the multipliers of rows; None where they have none."""
    if scale_ptr is None:
        scales = None
    else:
        scales = scale_ptr + row * ((K + _BLOCK - 1) // _BLOCK)
    return scales


@triton.jit
def add_block(total, x, w, x_scale, w_scales, block, DOT: tl.constexpr, ONE_SCALE: tl.constexpr):
    """Add the product of two tiles to [BM, BN]. Within 128 columns products are summed by themselves, then rescaled.

    `x_scale`: the multipliers of the rows of `x`, loaded, or None. `w_scales`: where those of the weight begin. Rows of
    bytes are taken as what the weight is. NVIDIA's matrix instructions then read them from registers, once for all
    weights that meet them, and not from shared memory each time.
    """
    if x.dtype == tl.uint8:
        x = x.to(w.dtype, bitcast=True)
    if w_scales is None:
        total = tl.dot(x.to(DOT), w.to(DOT), total, input_precision="ieee")
    else:
        w_scale = tl.load(w_scales + block)
        part = tl.dot(x.to(DOT), w.to(DOT), input_precision="ieee")
        if ONE_SCALE:
            if x_scale is None:
                total += part * w_scale
            else:
                total += part * (x_scale * w_scale)[:, None]
        else:
            part *= w_scale[None, :]
            if x_scale is not None:
                part *= x_scale[:, None]
            total += part
    return total


@triton.jit
def multipliers(scales, block):
    """Load the multipliers of rows; None where rows have none."""
    if scales is None:
        found = None
    else:
        found = tl.load(scales + block)
    return found


@triton.jit
def work_of(expert_of_tile_ptr, num_tiles_ptr, BLOCKS: tl.constexpr):
    """Return a program's tile, its expert (-1: no work) and which of BLOCKS it is: the blocks of a tile come together.

    So the rows of a tile, and the weights of an expert whose tiles follow each other, are read from the cache.
    """
    tile = tl.program_id(0) // BLOCKS
    expert = tl.load(expert_of_tile_ptr + tile, mask=tile < tl.load(num_tiles_ptr), other=-1)
    return tile, expert, tl.program_id(0) % BLOCKS


@triton.jit
def store_columns(out_ptr, values, row, live, column, WIDTH: tl.constexpr):
    tl.store(out_ptr + (row * WIDTH)[:, None] + column[None, :], values, mask=live[:, None] & (column < WIDTH)[None, :])
