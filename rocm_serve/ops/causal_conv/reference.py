"""The short convolution of Gated DeltaNet. Letters: T rows, C channels, K taps, B sequences."""

from __future__ import annotations

import torch

from rocm_serve.ops.batch import Sequences
from rocm_serve.ops.rows import silu_, steady_

_ROWS = 64  # at a time, so that what is summed stays in cache


def causal_conv(
    u_TC: torch.Tensor,
    weight_CK: torch.Tensor,
    state: torch.Tensor,
    sequences: Sequences,
) -> torch.Tensor:
    """Convolve each channel over time, then apply SiLU; carry each sequence's last K - 1 rows in `state`.

    Shapes: u [T, C], weight [C, K] (the last tap meets the current row), state [slots + 1, K - 1, C] oldest first,
    rewritten in place -> [T, C], dtype of u; rows outside the sequences come out as zeros. With `commits` the state
    is the one after so many rows of a sequence.
    Numerics: fp32 inside, one rounding; the state is the rows themselves. A cleared slot is the start of a sequence.
    """
    carried = weight_CK.shape[1] - 1
    pieces, taps, ends = [], [], []
    at = 0
    for b, slot in enumerate(sequences.slots):
        first, last = sequences.row_starts[b], sequences.row_starts[b + 1]
        pieces += [state[slot].to(u_TC.dtype), u_TC[first:last]]
        taps.append(torch.arange(at, at + last - first))
        kept = at + (last - first if sequences.commits is None else sequences.commits[b])
        ends.append(torch.arange(kept, kept + carried))
        at += carried + last - first
    y_TC = torch.zeros_like(u_TC)
    if not pieces:
        return y_TC
    joined = torch.cat(pieces)
    taps_N = torch.cat(taps).to(u_TC.device)
    wide, weight_KC = joined.float(), weight_CK.float().T.contiguous()
    first_row = sequences.row_starts[0]
    for at in range(0, len(taps_N), _ROWS):  # none, where no sequence has a row
        some = taps_N[at : at + _ROWS]
        total = wide[some].mul_(weight_KC[0])
        for j in range(1, carried + 1):
            total += wide[some + j].mul_(weight_KC[j])
        y_TC[first_row + at : first_row + at + len(some)] = steady_(silu_, total)
    state[sequences.slots_B.long()] = joined[torch.stack(ends).to(u_TC.device)].to(state.dtype)
    return y_TC
