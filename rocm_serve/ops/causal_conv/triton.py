"""The short convolution of Gated DeltaNet in Triton. Letters: T rows, C channels, K taps, B sequences."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rocm_serve.ops.batch import Sequences
from rocm_serve.ops.rows import zero_outside
from rocm_serve.ops.tiles_rows import causal_conv_tile
from rocm_serve.ops.triton_common.triton import arch, blocks, places, tile_of

MOST_ROWS = 16  # of a sequence in one program, at most; all that a state carries come from its first program


@triton.jit
def _taps_of(weight, column, exists, TAPS: tl.constexpr, PACKED: tl.constexpr):
    """Return the weights of some channels in fp32, one tensor for each tap.

    A channel's taps lie one after the other: loaded one by one they are as many accesses as numbers. PACKED: they are 8
    bytes, which are loaded as one number.
    """
    taps = ()
    if PACKED:
        kind: tl.constexpr = tl.int16 if weight.dtype.element_ty.primitive_bitwidth == 16 else tl.int32
        packed = tl.load(weight.to(tl.pointer_type(tl.int64), bitcast=True) + column, mask=exists, other=0)
        for j in tl.static_range(TAPS):
            tap = (packed >> (64 // TAPS * j)).to(kind).to(weight.dtype.element_ty, bitcast=True)
            taps = taps + (tap.to(tl.float32),)
    else:
        for j in tl.static_range(TAPS):
            taps = taps + (tl.load(weight + column * TAPS + j, mask=exists, other=0.0).to(tl.float32),)
    return taps


@triton.jit
def _row(u_at, window_at, row, exists, channels, u_row, TAPS: tl.constexpr):
    """Return one row of a sequence, which before row 0 lies in the window."""
    at = row + tl.zeros(exists.shape, tl.int32)
    new = tl.load(u_at + at.to(tl.int64) * u_row, mask=exists & (at >= 0), other=0.0)
    old = tl.load(window_at + (at + TAPS - 1) * channels, mask=exists & (at < 0), other=0.0)
    return tl.where(at >= 0, new, old.to(new.dtype))


@triton.jit(do_not_specialize=["row_starts", "slots", "commits"])
def causal_conv_kernel(
    u,
    weight,
    state,
    y,
    row_starts,
    slots,
    commits,
    channels,
    u_row,
    state_slot,
    TAPS: tl.constexpr,
    PACKED: tl.constexpr,
    COMMIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SEQUENCES: tl.constexpr,
):
    """Some rows of one sequence and some channels; each row is read once, and all before the first is used.

    The first program of a sequence alone reads the window, its channels of the state, and writes it anew at the end.
    SEQUENCES: how many share the programs of the grid, which find theirs; 0: the grid has a dimension for them.
    """
    b, start = tile_of(row_starts, tl.program_id(2), tl.program_id(1), SEQUENCES, ROWS)
    first = tl.load(row_starts + b)
    n = tl.load(row_starts + b + 1) - first
    if start >= n:
        return
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    exists = column < channels
    u_at = u + first.to(tl.int64) * u_row + column
    state_at = state + tl.load(slots + b).to(tl.int64) * state_slot + column
    last = tl.where(exists, n, 0)
    met = ()  # the rows before the first that taps meet, and the rows themselves
    for i in tl.static_range(TAPS - 1):
        met = met + (_row(u_at, state_at, start + i - (TAPS - 1), exists, channels, u_row, TAPS),)
    for i in tl.static_range(ROWS):
        met = met + (tl.load(u_at + (start + i).to(tl.int64) * u_row, mask=start + i < last, other=0.0),)
    taps = _taps_of(weight, column, exists, TAPS, PACKED)
    y_at = y + (first + start).to(tl.int64) * channels + column
    for i in tl.static_range(ROWS):
        total = tl.zeros((COLUMNS,), dtype=tl.float32)
        for j in tl.static_range(TAPS):
            total += met[i + j].to(tl.float32) * taps[j]
        made = (total * tl.sigmoid(total)).to(y.dtype.element_ty)
        tl.store(y_at + i * channels, made, mask=start + i < last)
    if start == 0:
        kept = tl.load(commits + b) if COMMIT else n
        carried = ()
        for j in tl.static_range(TAPS - 1):
            if ROWS == 1 and not COMMIT:
                carried = carried + (met[j + 1],)
            else:
                carried = carried + (_row(u_at, state_at, kept + j - (TAPS - 1), exists, channels, u_row, TAPS),)
        tl.debug_barrier()  # every thread has read the window
        for j in tl.static_range(TAPS - 1):
            tl.store(state_at + j * channels, carried[j].to(state.dtype.element_ty), mask=exists)


def causal_conv(
    u_TC: torch.Tensor,
    weight_CK: torch.Tensor,
    state: torch.Tensor,
    sequences: Sequences,
) -> torch.Tensor:
    """Convolve each channel over time, then apply SiLU; carry the last K - 1 rows: the reference's semantics.

    Rows of u may lie apart (a slice of a wider projection); the result is contiguous.
    Numerics: fp32 inside, one rounding; the state is the rows themselves.
    """
    rows, channels = u_TC.shape
    taps = weight_CK.shape[1]
    assert u_TC.stride(1) == 1 and weight_CK.is_contiguous(), "the channels of a row lie one after the other"
    assert state.is_contiguous()
    assert taps - 1 <= MOST_ROWS, f"{taps} taps, the kernel takes up to {MOST_ROWS + 1}"
    longest = max((b - a for a, b in zip(sequences.row_starts, sequences.row_starts[1:], strict=False)), default=0)
    many, made = sequences.num_sequences, sequences.row_starts[-1] - sequences.row_starts[0]
    one_each = made == many * longest and longest == 1 and not sequences.shared and sequences.commits_B is None
    if sequences.num_recurrent and not one_each:  # a captured step may have fewer rows when it is replayed
        y_TC = torch.zeros((rows, channels), dtype=u_TC.dtype, device=u_TC.device)
    else:
        y_TC = zero_outside(torch.empty((rows, channels), dtype=u_TC.dtype, device=u_TC.device), sequences.rows)
    if longest:
        # Prompts have one tile at every length: a chunk of one row compiles nothing while others wait.
        tile = causal_conv_tile(arch(), one_row=one_each and sequences.num_recurrent == many)
        columns = blocks(channels, tile["COLUMNS"])
        grid = (columns, blocks(longest, tile["ROWS"]), many)
        if sequences.shared:
            grid = (columns, places(made, many, tile["ROWS"]), 1)
        causal_conv_kernel[grid](
            u_TC,
            weight_CK,
            state,
            y_TC,
            sequences.row_starts_B1,
            sequences.slots_B,
            sequences.slots_B if sequences.commits_B is None else sequences.commits_B,
            channels,
            u_TC.stride(0),
            state.stride(0),
            TAPS=taps,
            PACKED=taps * weight_CK.itemsize == 8 and weight_CK.data_ptr() % 8 == 0,
            COMMIT=sequences.commits_B is not None,
            SEQUENCES=many if sequences.shared else 0,
            **tile,
        )
    return y_TC
