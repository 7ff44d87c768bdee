"""The short convolution of Gated DeltaNet. Letters: T rows, C channels, K taps, B sequences."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from rocm_serve.ops.batch import Sequences
from rocm_serve.ops.rows import steady


def causal_conv(
    u_TC: torch.Tensor,
    weight_CK: torch.Tensor,
    state: torch.Tensor,
    sequences: Sequences,
    *,
    row_states: torch.Tensor | None = None,
) -> torch.Tensor:
    """Convolve each channel over time, then apply SiLU; carry each sequence's last K - 1 rows in `state`.

    Shapes: u [T, C], weight [C, K] (the last tap meets the current row), state [slots + 1, K - 1, C] oldest first,
    rewritten in place -> [T, C], dtype of u; rows outside the sequences come out as zeros. `row_states`
    [T, K - 1, C], when given, receives the state after each row.
    Numerics: fp32 inside, one rounding; the state is the rows themselves. A cleared slot is the start of a sequence.
    """
    carried = weight_CK.shape[1] - 1
    pieces, taps, ends = [], [], []
    at = 0
    for b, slot in enumerate(sequences.slots):
        first, last = sequences.row_starts[b], sequences.row_starts[b + 1]
        pieces += [state[slot].to(u_TC.dtype), u_TC[first:last]]
        taps.append(torch.arange(at, at + last - first))
        at += carried + last - first
        ends.append(torch.arange(at - carried, at))
    y_TC = torch.zeros_like(u_TC)
    if not pieces:
        return y_TC
    joined = torch.cat(pieces)
    taps_N = torch.cat(taps).to(u_TC.device)
    wide, weight = joined.float(), weight_CK.float()
    span = wide.shape[0] - carried
    total = wide[:span] * weight[:, 0]
    for j in range(1, carried + 1):
        total += wide[j : j + span] * weight[:, j]
    y_TC[sequences.rows] = steady(F.silu, total[taps_N]).to(u_TC.dtype)
    state[sequences.slots_B.long()] = joined[torch.stack(ends).to(u_TC.device)].to(state.dtype)
    if row_states is not None:
        after = taps_N[:, None] + torch.arange(1, carried + 1, device=u_TC.device)
        row_states[sequences.rows] = joined[after].to(row_states.dtype)
    return y_TC
