"""The experts of rows that are alone, in Triton, by matrix instructions: the blocks of a row stand side by side.

Matrix instructions multiply with 8 columns or more. One row does not fill them, and is not padded: its blocks of 128
are the columns, [128, COLUMNS]. A weight is read as it lies, as rows of 128: [BN * COLUMNS, 128]. Of each product only
that of a block with its own counterpart is wanted, 1 of COLUMNS; there is time for the others, because reading takes
longer. A sum ends with its block, so it is rescaled once, and a row is prepared once in a program.

Two launches: silu(gate) * up in float32, then down, where a program goes through the experts of one row and quantises
what they have made, or a third does that before (MADE). Letters: T rows, H width, I expert width, E experts, k choices
a row; in kernels BN rows of a weight, M of those rows of 128.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from rocm_serve.ops.fp8 import BLOCK, fp8_max
from rocm_serve.ops.triton_common.triton import (
    blocks,
    following,
    let_next_begin,
    quantise_rows,
    quantise_tile,
    wait_for_previous,
)

_BLOCK = tl.constexpr(BLOCK)


def rows_alone_by_blocks(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    ids_Tk: torch.Tensor,
    weights_Tk: torch.Tensor,
    num_rows: int | torch.Tensor,
    w13_EIH: torch.Tensor,
    w13_scale: torch.Tensor | None,
    w2_EHI: torch.Tensor,
    w2_scale: torch.Tensor | None,
    out_TH: torch.Tensor,
    *,
    quantised: bool,
    dot: tl.dtype,
    tile: Mapping[str, int],
) -> None:
    """Compute `moe_experts` into `out_TH`. `tile`: one with ALONE 2. `quantised`: rows are, or are to be, FP8.

    `dot`: what they are multiplied as, but for what a tile says of FP8.
    """
    (rows, top_k), (experts, hidden, width) = ids_Tk.shape, w2_EHI.shape
    choices, top = rows * top_k, fp8_max(w13_EIH.dtype) if quantised else 0.0
    common = {
        "ids_ptr": ids_Tk,
        "num_rows": num_rows,
        "num_choices": choices,
        "EXPERTS": experts,
        "TOP_K": top_k,
        "ROWS_ON_DEVICE": isinstance(num_rows, torch.Tensor),
        **following(),
    }
    made = torch.empty(choices, width, dtype=torch.float32, device=x.device)
    blocks_gate_up_kernel[(choices, blocks(width, tile["UP_BN"]))](
        **{"x_ptr": x, "x_scale_ptr": x_scale, "w_ptr": w13_EIH, "w_scale_ptr": w13_scale, "made_ptr": made},
        **{"x_stride": x.stride(0), "K": hidden, "WIDTH": width, "TOP": top},
        QUANTISE=quantised and x_scale is None,
        DOT=_factors(dot, tile["UP_BITS"]),
        EVEN=hidden % (BLOCK * tile["UP_COLUMNS"]) == 0,
        STAGES=tile["UP_STAGES"],
        **_product(tile, "UP", width),
        **common,
    )
    made_scale = None
    if quantised and tile["MADE"]:
        made, made_scale = quantise_rows(made, w13_EIH.dtype)
    blocks_down_kernel[(rows, blocks(hidden, tile["DOWN_BN"]))](
        **{"made_ptr": made, "made_scale_ptr": made_scale, "w_ptr": w2_EHI, "w_scale_ptr": w2_scale},
        **{"weights_ptr": weights_Tk, "out_ptr": out_TH, "K": width, "WIDTH": hidden, "TOP": top},
        QUANTISE=quantised and made_scale is None,
        DOT=_factors(dot, tile["DOWN_BITS"]),
        EVEN=width % BLOCK == 0,
        **_product(tile, "DOWN", hidden),
        **common,
    )


def _factors(dot: tl.dtype, bits: int) -> tl.dtype:
    """Return what two factors become: float16 holds what FP8 holds, and its products are summed in float32."""
    return tl.float16 if dot.primitive_bitwidth == 8 and bits == 16 else dot


def _product(tile: Mapping[str, int], part: str, width: int) -> dict[str, int]:
    """Return the tile of a product over a weight of `width` rows."""
    rows = tile[f"{part}_BN"]
    return {
        "BN": rows,
        "COLUMNS": tile[f"{part}_COLUMNS"],
        "EARLY": tile[f"{part}_EARLY"],
        "ONE_SCALE": BLOCK % rows == 0 and width % BLOCK == 0,
        "num_warps": tile[f"{part}_WARPS"],
    }


@triton.jit
def expert_there(
    ids_ptr, choice, num_choices, num_rows, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, ROWS_ON_DEVICE: tl.constexpr
):
    """Return the expert of each choice, -1 where none is held here, read as blocks_down_kernel says."""
    if ROWS_ON_DEVICE:
        live = tl.load(num_rows, cache_modifier=".cg").to(tl.int32)
    else:
        live = num_rows
    inside = choice < tl.minimum(live * TOP_K, num_choices)
    expert = tl.load(ids_ptr + choice, mask=inside, other=-1, cache_modifier=".cg")
    return tl.where(expert < EXPERTS, expert, -1)


@triton.jit
def rows_of_weight(WIDTH: tl.constexpr, BN: tl.constexpr, COLUMNS: tl.constexpr, ONE_SCALE: tl.constexpr):
    """Return which row of a weight of WIDTH rows each of this program's rows of 128 is of: [M]."""
    row = tl.program_id(1) * BN + tl.arange(0, BN * COLUMNS) // COLUMNS
    if not ONE_SCALE:
        row = tl.minimum(row, WIDTH - 1)  # rows are read twice rather than masked
    return row


@triton.jit
def multipliers(scale_ptr, of_expert, first_row, rows, block, there, BLOCKS: tl.constexpr, ONE_SCALE: tl.constexpr):
    """Load the multipliers of blocks [COLUMNS]: those of each row [M, COLUMNS], or with ONE_SCALE of all [1, COLUMNS].

    `first_row`, `rows`: of the weight. `of_expert`: multipliers before those of each block's expert. None without any.
    """
    if scale_ptr is None:
        scale = None
    else:
        if ONE_SCALE:
            of_row = first_row // _BLOCK * BLOCKS
        else:
            of_row = (rows // _BLOCK * BLOCKS)[:, None]
        scale = tl.load(scale_ptr + ((of_expert + block)[None, :] + of_row), mask=there[None, :], other=0.0)
    return scale


@triton.jit
def blocks_at(at, there, columns):
    """Load blocks of a row [COLUMNS, 128]. `at`: where each begins; `columns`: how many each has."""
    deep = tl.arange(0, _BLOCK)[None, :]
    return tl.load(at[:, None] + deep, mask=there[:, None] & (deep < columns[:, None]), other=0.0)


@triton.jit
def added(total, w, x, scale, BN: tl.constexpr, COLUMNS: tl.constexpr, DOT: tl.constexpr):
    """Add the product of each block of a weight [M, 128] with its own block of a row [COLUMNS, 128] to [M, COLUMNS].

    `scale`: multipliers [1 or M, COLUMNS], or None.
    """
    part = tl.dot(w.to(DOT), tl.trans(x.to(DOT)), input_precision="ieee")
    if scale is not None:
        part *= scale
    own = (tl.arange(0, BN * COLUMNS) % COLUMNS)[:, None] == tl.arange(0, COLUMNS)[None, :]
    return tl.where(own, total + part, total)


@triton.jit
def whole(total, BN: tl.constexpr, COLUMNS: tl.constexpr):
    """Add up what belongs to each row of a weight: [BN]."""
    return tl.sum(tl.reshape(tl.sum(total, 1), (BN, COLUMNS)), 1)


@triton.jit
def kept(w, PDL: tl.constexpr):
    """Hand a loaded tile on, unchanged. Whatever rearranges it would be moved to its load, which then is waited for.

    Where PDL is, on NVIDIA's.
    """
    if PDL:
        each: tl.constexpr = 32 // w.dtype.primitive_bitwidth
        w = tl.inline_asm_elementwise("// kept", "=r,0", [w], dtype=w.dtype, is_pure=False, pack=each)
    return w


@triton.jit
def weight_blocks(at, columns, EVEN: tl.constexpr):
    """Load a block of each of some rows of a weight: [M, 128]. `columns`: how many of it are there, all with EVEN."""
    if EVEN:
        w = tl.load(at)
    else:
        w = tl.load(at, mask=tl.arange(0, _BLOCK)[None, :] < columns[:, None], other=0.0)
    return w


@triton.jit(do_not_specialize=["num_rows", "num_choices"])
def blocks_gate_up_kernel(
    x_ptr, x_scale_ptr, w_ptr, w_scale_ptr, made_ptr, ids_ptr, num_rows, x_stride, num_choices, K: tl.constexpr,
    WIDTH: tl.constexpr, TOP: tl.constexpr, QUANTISE: tl.constexpr, ONE_SCALE: tl.constexpr, EVEN: tl.constexpr,
    DOT: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, ROWS_ON_DEVICE: tl.constexpr, BN: tl.constexpr,
    COLUMNS: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply the row of one choice with BN rows of gate and of up: silu(gate) * up, float32 [T k, WIDTH]."""
    wait_for_previous(PDL)
    let_next_begin(PDL and EARLY)
    choice = tl.program_id(0)
    expert = expert_there(ids_ptr, choice, num_choices, num_rows, EXPERTS, TOP_K, ROWS_ON_DEVICE)
    if expert < 0:
        return
    row, own = (choice // TOP_K).to(tl.int64), expert.to(tl.int64)
    per: tl.constexpr = (K + _BLOCK - 1) // _BLOCK  # blocks of a row
    of_expert = own * ((2 * WIDTH + _BLOCK - 1) // _BLOCK * per)
    of_block, deep = tl.arange(0, BN * COLUMNS) % COLUMNS, tl.arange(0, _BLOCK)[None, :]
    first_row, rows = tl.program_id(1) * BN, rows_of_weight(WIDTH, BN, COLUMNS, ONE_SCALE)
    gate_at = (w_ptr + (own * (2 * WIDTH) + rows) * K + of_block * _BLOCK)[:, None] + deep
    gate, up = tl.zeros((BN * COLUMNS, COLUMNS), tl.float32), tl.zeros((BN * COLUMNS, COLUMNS), tl.float32)
    for first in tl.range(0, per, COLUMNS, num_stages=STAGES):
        gate_w = weight_blocks(gate_at + first * _BLOCK, K - (first + of_block) * _BLOCK, EVEN)
        up_w = weight_blocks(gate_at + WIDTH * K + first * _BLOCK, K - (first + of_block) * _BLOCK, EVEN)
        block = first + tl.arange(0, COLUMNS)
        there, up_row = block < per, WIDTH + first_row
        gate_s = multipliers(w_scale_ptr, of_expert, first_row, rows, block, there, per, ONE_SCALE)
        up_s = multipliers(w_scale_ptr, of_expert, up_row, WIDTH + rows, block, there, per, ONE_SCALE)
        x = blocks_at(x_ptr + row * x_stride + block * _BLOCK, there, K - block * _BLOCK)
        if x_scale_ptr is not None:
            x_s = tl.load(x_scale_ptr + row * per + block, mask=there, other=0.0)[None, :]
            gate_s, up_s = gate_s * x_s, up_s * x_s
        elif QUANTISE:
            x, x_s = quantise_tile(x.to(tl.float32), TOP, w_ptr.dtype.element_ty)
            gate_s, up_s = gate_s * x_s[None, :], up_s * x_s[None, :]
        gate = added(gate, gate_w, x, gate_s, BN, COLUMNS, DOT)
        up = added(up, up_w, x, up_s, BN, COLUMNS, DOT)
    let_next_begin(PDL and not EARLY)
    gate_y, up_y = whole(gate, BN, COLUMNS), whole(up, BN, COLUMNS)
    column = first_row + tl.arange(0, BN)
    to = made_ptr + choice.to(tl.int64) * WIDTH + column
    tl.store(to, gate_y * tl.sigmoid(gate_y) * up_y, mask=column < WIDTH)


@triton.jit
def weight_of_down(w_ptr, expert, rows, begins, K: tl.constexpr, WIDTH: tl.constexpr, EVEN: tl.constexpr):
    """Load a block of each of some rows [M], of the expert that each of them names: [M, 128], zeros for none."""
    deep = tl.arange(0, _BLOCK)[None, :]
    own = tl.maximum(expert, 0).to(tl.int64)
    w_at = (w_ptr + (own * WIDTH + rows) * K + begins)[:, None] + deep
    if EVEN:
        w = tl.load(w_at, mask=(expert >= 0)[:, None], other=0.0)
    else:
        w = tl.load(w_at, mask=deep < tl.where(expert >= 0, K - begins, 0)[:, None], other=0.0)
    return w


@triton.jit
def choice_of(place, row, num_choices, PER: tl.constexpr, TOP_K: tl.constexpr):
    """Return the choice of a place in the row of blocks of all choices, PER each; `num_choices` past their end."""
    return tl.where(place < TOP_K * PER, row * TOP_K + place // PER, num_choices)


@triton.jit(do_not_specialize=["num_rows", "num_choices"])
def blocks_down_kernel(
    made_ptr, made_scale_ptr, w_ptr, w_scale_ptr, weights_ptr, out_ptr, ids_ptr, num_rows, num_choices,
    K: tl.constexpr, WIDTH: tl.constexpr, TOP: tl.constexpr, QUANTISE: tl.constexpr, ONE_SCALE: tl.constexpr,
    EVEN: tl.constexpr, DOT: tl.constexpr, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, ROWS_ON_DEVICE: tl.constexpr,
    BN: tl.constexpr, COLUMNS: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply what all experts of one row have made with BN rows of each one's down, and sum, weighted.

    The blocks of all choices of a row are one row of blocks; everything that is read of them is asked for at once.
    EARLY: before the kernel before this one has ended. That one lets this one begin after its own wait only, so what
    kernels before it have made is there: ids, their weights, a count. They are read past the nearest cache, which may
    hold what was there in their place.
    """
    wait_for_previous(PDL and not EARLY)
    row, first_row = tl.program_id(0), tl.program_id(1) * BN
    per: tl.constexpr = (K + _BLOCK - 1) // _BLOCK
    steps: tl.constexpr = (TOP_K * per + COLUMNS - 1) // COLUMNS
    of_block, rows = tl.arange(0, BN * COLUMNS) % COLUMNS, rows_of_weight(WIDTH, BN, COLUMNS, ONE_SCALE)
    experts, ws, held, shares, scales, xs = (), (), (), (), (), ()
    for step in tl.static_range(steps):
        choice = choice_of(step * COLUMNS + of_block, row, num_choices, per, TOP_K)
        experts += (expert_there(ids_ptr, choice, num_choices, num_rows, EXPERTS, TOP_K, ROWS_ON_DEVICE),)
    for step in tl.static_range(steps):
        begins = (step * COLUMNS + of_block) % per * _BLOCK
        ws += (weight_of_down(w_ptr, experts[step], rows, begins, K, WIDTH, EVEN),)
    for step in tl.static_range(steps):
        place = step * COLUMNS + tl.arange(0, COLUMNS)
        choice = choice_of(place, row, num_choices, per, TOP_K)
        expert = expert_there(ids_ptr, choice, num_choices, num_rows, EXPERTS, TOP_K, ROWS_ON_DEVICE)
        share = tl.load(weights_ptr + choice, mask=expert >= 0, other=0.0, cache_modifier=".cg")[None, :]
        if w_scale_ptr is not None:
            of_expert = expert * ((WIDTH + _BLOCK - 1) // _BLOCK * per)
            share *= multipliers(w_scale_ptr, of_expert, first_row, rows, place % per, expert >= 0, per, ONE_SCALE)
        held, shares = held + (expert >= 0,), shares + (share,)
    wait_for_previous(PDL and EARLY)
    for step in tl.static_range(steps):
        place = step * COLUMNS + tl.arange(0, COLUMNS)
        choice = choice_of(place, row, 0, per, TOP_K)
        at = choice.to(tl.int64) * K + place % per * _BLOCK
        xs += (blocks_at(made_ptr + at, held[step], K - place % per * _BLOCK),)
        scale = shares[step]
        if made_scale_ptr is not None:
            scale *= tl.load(made_scale_ptr + choice * per + place % per, mask=held[step], other=0.0)[None, :]
        scales += (scale,)
    total = tl.zeros((BN * COLUMNS, COLUMNS), tl.float32)
    for step in tl.static_range(steps):
        x, scale = xs[step], scales[step]
        if QUANTISE:
            x, x_s = quantise_tile(x, TOP, w_ptr.dtype.element_ty)
            scale *= x_s[None, :]
        total = added(total, kept(ws[step], PDL), x, scale, BN, COLUMNS, DOT)
    let_next_begin(PDL)
    y = whole(total, BN, COLUMNS)
    column = first_row + tl.arange(0, BN)
    tl.store(out_ptr + row.to(tl.int64) * WIDTH + column, y.to(out_ptr.dtype.element_ty), mask=column < WIDTH)
