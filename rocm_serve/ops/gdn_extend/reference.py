"""What a step with drafts puts before a sequence's rows, and what it keeps of them: see ops/replay.py.

Letters: T rows of the batch, E extended rows, C channels of the convolution, V of the gate, G gates, W = C + V + G.
"""

from __future__ import annotations

import torch

from rocm_serve.ops.batch import Sequences


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
    """Return each sequence's pending rows that were accepted, then its own, and keep its drafts as the pending ones.

    Shapes: u [T, C], b and a [T, G], z [T, V], pending_u [slots + 1, K, C], pending_ba [slots + 1, K, G] -> [rows, W],
    rows >= E, columns u, z, b, a. `sequences` are the recurrent ones of the batch, `extended` the same over their
    extended rows: those that a sequence has more are its first pending ones, those behind its commit are drafts, which
    become its first pending ones. Gates z of pending rows, and all of the rows from E on, are zeros.
    """
    channels, gates = u_TC.shape[1], ba_TG.shape[1]
    assert extended.commits is not None, "the rows behind a commit are the drafts"
    x_EW = u_TC.new_zeros(rows, channels + z_TV.shape[1] + gates)
    for b, slot in enumerate(extended.slots):
        first, stop = sequences.row_starts[b : b + 2]
        at, end = extended.row_starts[b : b + 2]
        own, drafts = end - (stop - first), end - at - extended.commits[b]
        x_EW[at:own, :channels] = pending_u[slot, : own - at]
        x_EW[at:own, -gates:] = pending_ba[slot, : own - at]
        x_EW[own:end] = torch.cat((u_TC[first:stop], z_TV[first:stop], ba_TG[first:stop]), dim=1)
        pending_u[slot, :drafts] = u_TC[stop - drafts : stop]
        pending_ba[slot, :drafts] = ba_TG[stop - drafts : stop]
    return x_EW
