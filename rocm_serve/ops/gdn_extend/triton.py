"""What a step with drafts puts before a sequence's rows, in Triton: one launch for all that is copied.

Letters: T rows of the batch, E extended rows, C channels of the convolution, V of the gate, G gates, W = C + V + G.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rocm_serve.ops.batch import Sequences

_BLOCK = 512  # columns of a program: 16 bytes a lane of one wave of 64


@triton.jit
def _carry(
    rows, row, pending, x, x_row, column, first, n, at, held, replayed, drafts, slot,
    K: tl.constexpr, WIDTH: tl.constexpr, OFFSET: tl.constexpr, PENDING: tl.constexpr,
):  # fmt: skip
    """Copy some columns of one sequence. Pending rows are read before they are written, by the same threads."""
    inside = column < WIDTH
    zeros = tl.zeros(column.shape, x.dtype.element_ty)
    if PENDING:
        for i in range(0, held):
            before = tl.load(pending + (slot * K + i) * WIDTH + column, mask=inside, other=0.0)
            tl.store(x + (at + i) * x_row + OFFSET + column, before, mask=inside)
    for i in range(held, replayed):
        tl.store(x + (at + i) * x_row + OFFSET + column, zeros, mask=inside)
    for i in range(0, n):
        own = tl.load(rows + (first + i) * row + column, mask=inside, other=0.0)
        tl.store(x + (at + replayed + i) * x_row + OFFSET + column, own, mask=inside)
    if PENDING:
        for i in range(0, drafts):
            own = tl.load(rows + (first + n - drafts + i) * row + column, mask=inside, other=0.0)
            tl.store(pending + (slot * K + i) * WIDTH + column, own, mask=inside)


@triton.jit(do_not_specialize=["row_starts", "extended", "slots", "commits", "count", "padded"])
def gdn_extend_kernel(
    u, ba, z, pending_u, pending_ba, x, row_starts, extended, slots, commits, count, padded, u_row, ba_row, z_row,
    C: tl.constexpr, V: tl.constexpr, G: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Some columns of one sequence; the programs behind the last one write the zeros behind its rows."""
    block, b = tl.program_id(0), tl.program_id(1)
    live = b < count
    some = tl.minimum(b, count - 1)
    first = tl.load(row_starts + b).to(tl.int64)
    n = tl.load(row_starts + tl.minimum(b + 1, count)) - first
    at = tl.load(extended + b).to(tl.int64)
    end = tl.where(live, tl.load(extended + some + 1), padded)
    slot = tl.load(slots + some).to(tl.int64)
    replayed = (end - at - n).to(tl.int32)
    held = tl.where(live, replayed, 0)
    drafts = tl.where(live, end - at - tl.load(commits + some), 0).to(tl.int32)
    u_blocks: tl.constexpr = (C + BLOCK - 1) // BLOCK
    z_blocks: tl.constexpr = (V + BLOCK - 1) // BLOCK
    lane = tl.arange(0, BLOCK)
    if block < u_blocks:
        column = block * BLOCK + lane
        _carry(u, u_row, pending_u, x, C + V + G, column, first, n, at, held, replayed, drafts, slot, K, C, 0, True)
    elif block < u_blocks + z_blocks:
        column = (block - u_blocks) * BLOCK + lane
        _carry(z, z_row, z, x, C + V + G, column, first, n, at, 0, replayed, drafts, slot, K, V, C, False)
    else:
        column = (block - u_blocks - z_blocks) * BLOCK + lane
        _carry(
            ba, ba_row, pending_ba, x, C + V + G, column, first, n, at, held, replayed, drafts, slot, K, G, C + V, True
        )  # fmt: skip


def gdn_extend(
    u_TC: torch.Tensor,
    ba_TG: torch.Tensor,
    z_TV: torch.Tensor,
    pending_u: torch.Tensor,
    pending_ba: torch.Tensor,
    sequences: Sequences,
    extended: Sequences,
    *,
    rows: int,
) -> torch.Tensor:
    """Put accepted pending rows before each sequence's own, keep its drafts: the reference's semantics, bit by bit.

    Rows of u, b, a and z may lie apart. The host's copies of the sequences are not read: a captured call is right for
    any sequences of as many.
    """
    channels, gates, value = u_TC.shape[1], ba_TG.shape[1], z_TV.shape[1]
    assert u_TC.dtype == ba_TG.dtype == z_TV.dtype == pending_u.dtype == pending_ba.dtype, "one dtype"
    assert pending_u.is_contiguous() and pending_ba.is_contiguous()
    assert all(x.stride(1) == 1 for x in (u_TC, ba_TG, z_TV)), "the columns of a row lie one after the other"
    assert extended.commits_B is not None, "the rows behind a commit are the drafts"
    count = sequences.num_sequences
    make = torch.empty if count else torch.zeros
    x_EW = make((rows, channels + value + gates), dtype=u_TC.dtype, device=u_TC.device)
    if not count or not rows:
        return x_EW
    blocks = sum(triton.cdiv(width, _BLOCK) for width in (channels, value, gates))
    gdn_extend_kernel[(blocks, count + 1)](
        *(u_TC, ba_TG, z_TV, pending_u, pending_ba, x_EW),
        *(sequences.row_starts_B1, extended.row_starts_B1, extended.slots_B, extended.commits_B),
        *(count, rows, u_TC.stride(0), ba_TG.stride(0), z_TV.stride(0)),
        C=channels,
        V=value,
        G=gates,
        K=pending_u.shape[1],
        BLOCK=_BLOCK,
        num_warps=1,
    )
    return x_EW
