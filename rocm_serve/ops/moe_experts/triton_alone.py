"""The experts of rows that are alone, in Triton: three launches, whatever other rows have chosen.

A program multiplies and adds in place, without matrix instructions: all it reads of a weight is on its way at once. The
first product quantises its row by itself, again in every program: that is less than another launch.

Letters: T rows, H width, I expert width, E experts, k choices a row; in kernels BN rows of a weight, BK columns.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from rocm_serve.ops.fp8 import BLOCK, fp8_max
from rocm_serve.ops.moe_experts.triton_few_kernels import few_activate_kernel
from rocm_serve.ops.moe_experts.triton_order import expert_of
from rocm_serve.ops.triton_common.triton import blocks, following, let_next_begin, quantise_tile, wait_for_previous

_BLOCK = tl.constexpr(BLOCK)
_WIDE = 512  # columns of FP8 that 32 lanes load at once


def rows_alone(
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
    tile: Mapping[str, int],
) -> None:
    """Compute `moe_experts` into `out_TH`. `tile`: one with ALONE. `quantised`: rows are, or are to be, FP8."""
    (rows, top_k), (experts, hidden, width) = ids_Tk.shape, w2_EHI.shape
    choices, width_blocks = rows * top_k, blocks(width, BLOCK)
    common = {
        "ids_ptr": ids_Tk,
        "num_rows": num_rows,
        "num_choices": choices,
        "EXPERTS": experts,
        "TOP_K": top_k,
        "ROWS_ON_DEVICE": isinstance(num_rows, torch.Tensor),
        "RUN": 16 // w13_EIH.itemsize,
        **following(),
    }
    early = bool(tile.get("EARLY"))
    both = torch.empty(choices, 2 * width, dtype=torch.float32, device=x.device)
    up, deep = tile["UP_BN"], max(BLOCK, min(tile["UP_BK"], triton.next_power_of_2(hidden)))
    top = fp8_max(w13_EIH.dtype) if quantised else 0.0
    alone_gate_up_kernel[(choices, blocks(width, up))](
        **{"x_ptr": x, "x_scale_ptr": x_scale, "w_ptr": w13_EIH, "w_scale_ptr": w13_scale, "both_ptr": both},
        **{"x_stride": x.stride(0), "K": hidden, "WIDTH": width, "TOP": top},
        QUANTISE=quantised and x_scale is None,
        ONE_SCALE=BLOCK % up == 0 and width % BLOCK == 0,
        **{"BN": up, "BK": deep, "WIDE": min(_WIDE, deep)},
        STAGES=tile["UP_STAGES"] if deep < hidden else 1,
        EARLY=early,
        num_warps=tile["UP_WARPS"],
        **common,
    )
    made = torch.empty(choices, width, dtype=w13_EIH.dtype if quantised else torch.float32, device=x.device)
    made_scale = torch.empty(choices, width_blocks, dtype=torch.float32, device=x.device) if quantised else None
    few_activate_kernel[(blocks(choices, 4), width_blocks)](
        both, made, made_scale, choices, WIDTH=width, SPLITS=1, TOP=top, ROWS=4, EARLY=early, num_warps=4, **following()
    )
    down = tile["DOWN_BN"]
    alone_down_kernel[(rows, blocks(hidden, down))](
        **{"made_ptr": made, "made_scale_ptr": made_scale, "w_ptr": w2_EHI, "w_scale_ptr": w2_scale},
        **{"weights_ptr": weights_Tk, "out_ptr": out_TH, "K": width, "WIDTH": hidden},
        ONE_SCALE=BLOCK % down == 0,
        BN=down,
        BK=max(BLOCK, triton.next_power_of_2(width)),
        CHOSEN=triton.next_power_of_2(top_k),
        num_warps=tile["DOWN_WARPS"],
        **common,
    )


@triton.jit
def factors(x, QUANTISE: tl.constexpr, TOP: tl.constexpr, codes: tl.constexpr):
    """Return blocks of 128 columns [blocks, 128] as their products see them: quantised and widened again."""
    if QUANTISE:
        code, scale = quantise_tile(x, TOP, codes)
        x = code.to(tl.float32) * scale[:, None]
    return x


@triton.jit
def columns_of(BK: tl.constexpr, WIDE: tl.constexpr):
    """Number BK columns as [pieces, 1, WIDE]: each row of a piece lies in one warp, which adds it up without others."""
    return tl.arange(0, BK // WIDE)[:, None, None] * WIDE + tl.arange(0, WIDE)[None, None, :]


@triton.jit
def loaded(w_at, there, EVEN: tl.constexpr):
    if EVEN:
        w = tl.load(w_at)
    else:
        w = tl.load(w_at, mask=there, other=0.0)
    return w


@triton.jit
def multiplied(w, x, scale, RUN: tl.constexpr):
    """Multiply rows of a weight with a row [pieces, 1, WIDE], rescaled: sums of RUN columns [pieces, rows, WIDE / RUN].

    `scale`: [pieces, rows or 1, blocks], or None.
    """
    pieces: tl.constexpr = w.shape[0]
    runs: tl.constexpr = w.shape[2] // RUN
    sums = tl.sum(tl.reshape(w.to(tl.float32) * x, (pieces, w.shape[1], runs, RUN)), 3)
    if scale is not None:
        rows: tl.constexpr = scale.shape[1]
        each: tl.constexpr = scale.shape[2]
        spread = tl.broadcast_to(scale[:, :, :, None], (pieces, rows, each, runs // each))
        sums *= tl.reshape(spread, (pieces, rows, runs))
    return sums


@triton.jit
def scales_of(w_scale_ptr, own, inside, block, there, K: tl.constexpr, WIDTH: tl.constexpr, ONE_SCALE: tl.constexpr):
    """Load the multipliers of blocks of columns of expert `own`: those of each row, or with ONE_SCALE of all rows."""
    if w_scale_ptr is None:
        scale = None
    else:
        blocks_of_k: tl.constexpr = (K + _BLOCK - 1) // _BLOCK
        if ONE_SCALE:
            of_rows = own * ((WIDTH + _BLOCK - 1) // _BLOCK) + tl.max(inside, 0) // _BLOCK
        else:
            of_rows = own * ((WIDTH + _BLOCK - 1) // _BLOCK) + (inside // _BLOCK)[None, :, None]
        scale = tl.load(w_scale_ptr + of_rows * blocks_of_k + block, mask=there & (block < blocks_of_k), other=0.0)
    return scale


@triton.jit(do_not_specialize=["num_rows", "num_choices"])
def alone_gate_up_kernel(
    x_ptr,
    x_scale_ptr,
    w_ptr,
    w_scale_ptr,
    both_ptr,
    ids_ptr,
    num_rows,
    x_stride,
    num_choices,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    TOP: tl.constexpr,
    QUANTISE: tl.constexpr,
    ONE_SCALE: tl.constexpr,
    RUN: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS_ON_DEVICE: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    WIDE: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply the row of one choice with BN rows of gate and of up: float32 [T k, 2 WIDTH]."""
    wait_for_previous(PDL)
    let_next_begin(PDL and EARLY)
    choice = tl.program_id(0)
    expert = expert_of(ids_ptr, choice, num_choices, num_rows, TOP_K, ROWS_ON_DEVICE)
    if (expert < 0) | (expert >= EXPERTS):
        return
    row, column = (choice // TOP_K).to(tl.int64), tl.program_id(1) * BN + tl.arange(0, BN)
    inside = tl.minimum(column, WIDTH - 1)
    deep, own = columns_of(BK, WIDE), expert.to(tl.int64)
    gate_at = w_ptr + ((own * (2 * WIDTH) + inside) * K)[None, :, None] + deep
    blocks_of_k: tl.constexpr = (K + _BLOCK - 1) // _BLOCK
    block = columns_of(BK // _BLOCK, WIDE // _BLOCK)
    x_at = tl.arange(0, BK // _BLOCK)[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    gate, up = tl.zeros((BK // WIDE, BN, WIDE // RUN), tl.float32), tl.zeros((BK // WIDE, BN, WIDE // RUN), tl.float32)
    for k in tl.range(0, K, BK, num_stages=STAGES):
        # rows of the weight last: of several tiles, the one loaded last says in which lanes products are made
        x = tl.load(x_ptr + row * x_stride + k + x_at, mask=x_at < K - k, other=0.0).to(tl.float32)
        of_k = k // _BLOCK + block
        gate_s = scales_of(w_scale_ptr, own, inside, of_k, of_k >= 0, K, 2 * WIDTH, ONE_SCALE)
        up_s = scales_of(w_scale_ptr, own, WIDTH + inside, of_k, of_k >= 0, K, 2 * WIDTH, ONE_SCALE)
        gate_w = loaded(gate_at + k, deep < K - k, K % BK == 0)
        up_w = loaded(gate_at + WIDTH * K + k, deep < K - k, K % BK == 0)
        x = factors(x, QUANTISE, TOP, w_ptr.dtype.element_ty)
        if x_scale_ptr is not None:
            of_x = k // _BLOCK + tl.arange(0, BK // _BLOCK)
            x *= tl.load(x_scale_ptr + row * blocks_of_k + of_x, mask=of_x < blocks_of_k, other=0.0)[:, None]
        x = tl.reshape(x, (BK // WIDE, 1, WIDE))
        gate += multiplied(gate_w, x, gate_s, RUN)
        up += multiplied(up_w, x, up_s, RUN)
    let_next_begin(PDL and not EARLY)
    to = both_ptr + choice.to(tl.int64) * (2 * WIDTH) + column
    tl.store(to, tl.sum(tl.sum(gate, 0), 1), mask=column < WIDTH)
    tl.store(to + WIDTH, tl.sum(tl.sum(up, 0), 1), mask=column < WIDTH)


@triton.jit(do_not_specialize=["num_rows", "num_choices"])
def alone_down_kernel(
    made_ptr,
    made_scale_ptr,
    w_ptr,
    w_scale_ptr,
    weights_ptr,
    out_ptr,
    ids_ptr,
    num_rows,
    num_choices,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    ONE_SCALE: tl.constexpr,
    RUN: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    CHOSEN: tl.constexpr,
    ROWS_ON_DEVICE: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply what all experts of one row have made with BN rows of each one's down, and sum, weighted."""
    wait_for_previous(PDL)
    row = tl.program_id(0)
    column = tl.program_id(1) * BN + tl.arange(0, BN)
    inside = tl.minimum(column, WIDTH - 1)
    deep = tl.arange(0, BK)[None, None, :]
    block = tl.arange(0, BK // _BLOCK)[None, None, :]
    chosen = tl.arange(0, CHOSEN)
    chosen = tl.where(chosen < TOP_K, row * TOP_K + chosen, num_choices)
    expert = expert_of(ids_ptr, chosen, num_choices, num_rows, TOP_K, ROWS_ON_DEVICE)
    is_held = (expert >= 0) & (expert < EXPERTS)
    weight = tl.load(weights_ptr + chosen, mask=is_held, other=0.0)[:, None, None]
    held = is_held[:, None, None]
    own = tl.where(is_held, expert, 0).to(tl.int64)[:, None, None]
    choice = chosen.to(tl.int64)[:, None, None]
    scale = scales_of(w_scale_ptr, own, inside, block, held, K, WIDTH, ONE_SCALE)
    if made_scale_ptr is not None:
        blocks_of_k: tl.constexpr = (K + _BLOCK - 1) // _BLOCK
        of_made = made_scale_ptr + choice * blocks_of_k + block
        scale *= tl.load(of_made, mask=held & (block < blocks_of_k), other=0.0)
    x = tl.load(made_ptr + choice * K + deep, mask=held & (deep < K), other=0.0).to(tl.float32)
    w_at = w_ptr + (own * WIDTH + inside[None, :, None]) * K + deep
    w = tl.load(w_at, mask=held & (deep < K), other=0.0)  # last: see above
    y = tl.sum(tl.sum(multiplied(w, x, scale, RUN) * weight, 0), 1)
    let_next_begin(PDL)
    tl.store(out_ptr + row.to(tl.int64) * WIDTH + column, y.to(out_ptr.dtype.element_ty), mask=column < WIDTH)
