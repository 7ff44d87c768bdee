"""The short convolution of Gated DeltaNet in Triton. Letters: T rows, C channels, K taps, B sequences."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rocm_serve.ops.batch import Sequences
from rocm_serve.ops.rows import zero_outside
from rocm_serve.ops.triton_common.triton import places, tile_of

_ROWS = 32
_COLUMNS = 128


@triton.jit
def _carry(u_at, window_at, state_at, kept, column, exists, channels, u_row, TAPS: tl.constexpr):
    """Write the last K - 1 of the old window and the first `kept` new rows to the state."""
    for j in tl.static_range(TAPS - 1):
        at = kept + j - (TAPS - 1) + tl.zeros_like(column)
        new = tl.load(u_at + at.to(tl.int64) * u_row + column, mask=exists & (at >= 0), other=0.0)
        old = tl.load(window_at + (at + TAPS - 1) * channels + column, mask=exists & (at < 0), other=0.0)
        x = tl.where(at >= 0, new, old.to(new.dtype))
        tl.store(state_at + j * channels + column, x.to(state_at.dtype.element_ty), mask=exists)


@triton.jit(do_not_specialize=["row_starts", "slots", "commits"])
def causal_conv_kernel(
    u,
    weight,
    window,
    state,
    y,
    row_starts,
    slots,
    commits,
    channels,
    u_row,
    state_slot,
    TAPS: tl.constexpr,
    COMMIT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SEQUENCES: tl.constexpr,
):
    """Some rows of one sequence and some channels. The first tile of a sequence also writes its new state.

    `window` [B, K - 1, C] is a copy of the states before this step: programs read it while the state is rewritten.
    SEQUENCES: how many share the programs of the grid, which find theirs; 0: the grid has a dimension for them.
    """
    b, start = tile_of(row_starts, tl.program_id(2), tl.program_id(0), SEQUENCES, ROWS)
    first = tl.load(row_starts + b)
    n = tl.load(row_starts + b + 1) - first
    if start >= n:
        return
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    exists = column < channels
    row = start + tl.arange(0, ROWS)
    real = (row < n)[:, None] & exists[None, :]
    u_at = u + first.to(tl.int64) * u_row
    window_at = window + b.to(tl.int64) * (TAPS - 1) * channels
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for j in tl.static_range(TAPS):
        at = (row + j - (TAPS - 1))[:, None]  # the row that tap j meets; before 0 it lies in the window
        x = tl.load(u_at + at.to(tl.int64) * u_row + column[None, :], mask=real & (at >= 0), other=0.0)
        if start == 0:  # later tiles begin with more rows than taps before them
            old = tl.load(window_at + (at + TAPS - 1) * channels + column[None, :], mask=real & (at < 0), other=0.0)
            x = tl.where(at >= 0, x, old.to(u.dtype.element_ty))
        w = tl.load(weight + column * TAPS + j, mask=exists, other=0.0).to(tl.float32)
        total += x.to(tl.float32) * w[None, :]
    y_at = (first + row).to(tl.int64)[:, None] * channels + column[None, :]
    tl.store(y + y_at, (total * tl.sigmoid(total)).to(y.dtype.element_ty), mask=real)
    if start == 0:
        state_at = state + tl.load(slots + b).to(tl.int64) * state_slot
        kept = tl.load(commits + b) if COMMIT else n
        _carry(u_at, window_at, state_at, kept, column, exists, channels, u_row, TAPS)


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
    assert taps - 1 <= _ROWS, f"{taps} taps, the kernel takes up to {_ROWS + 1}"
    if sequences.num_recurrent:  # a captured step may have fewer rows when it is replayed
        y_TC = torch.zeros((rows, channels), dtype=u_TC.dtype, device=u_TC.device)
    else:
        y_TC = zero_outside(torch.empty((rows, channels), dtype=u_TC.dtype, device=u_TC.device), sequences.rows)
    longest = max((b - a for a, b in zip(sequences.row_starts, sequences.row_starts[1:], strict=False)), default=0)
    if longest:
        many, columns = sequences.num_sequences, triton.cdiv(channels, _COLUMNS)
        grid = (triton.cdiv(longest, _ROWS), columns, many)
        if sequences.shared:
            grid = (places(sequences.row_starts[-1] - sequences.row_starts[0], many, _ROWS), columns, 1)
        causal_conv_kernel[grid](
            u_TC,
            weight_CK,
            state.index_select(0, sequences.slots_B),
            state,
            y_TC,
            sequences.row_starts_B1,
            sequences.slots_B,
            sequences.slots_B if sequences.commits_B is None else sequences.commits_B,
            channels,
            u_TC.stride(0),
            state.stride(0),
            TAPS=taps,
            COMMIT=sequences.commits_B is not None,
            ROWS=_ROWS,
            COLUMNS=_COLUMNS,
            SEQUENCES=many if sequences.shared else 0,
            num_warps=4,
        )
    return y_TC
