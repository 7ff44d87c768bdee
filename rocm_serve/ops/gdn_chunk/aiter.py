"""The gated delta rule over prompt rows by AITER, states V-major.

Letters: T rows, B sequences, H value heads, h key heads, K key head size, V value head size.
"""

from __future__ import annotations

import torch
from aiter.ops.triton.gated_delta_net.gated_delta_rule import chunk_gated_delta_rule_opt_vk

from rocm_serve.ops.batch import Sequences
from rocm_serve.ops.gdn import gates


def gdn_chunk(
    q_ThK: torch.Tensor,
    k_ThK: torch.Tensor,
    v_THV: torch.Tensor,
    a_TH: torch.Tensor,
    b_TH: torch.Tensor,
    a_log_H: torch.Tensor,
    dt_bias_H: torch.Tensor,
    state: torch.Tensor,
    sequences: Sequences,
    out_THV: torch.Tensor,
) -> torch.Tensor:
    """Advance each sequence's state over its rows and write what they read to rows of `out`; see the reference.

    States are gathered from their slots and put back: releases before v0.1.20 know no slots.
    """
    assert state.dtype == torch.float32, f"the state is float32, not {state.dtype}"
    spans = zip(sequences.row_starts, sequences.row_starts[1:], strict=False)
    live = [b for b, (first, last) in enumerate(spans) if last > first]
    if not live:
        return out_THV
    rows = sequences.rows
    starts = [sequences.row_starts[b] - rows.start for b in live] + [rows.stop - rows.start]
    slots = state.new_tensor([sequences.slots[b] for b in live], dtype=torch.int64)
    g_TH, beta_TH = gates(a_TH[rows], b_TH[rows], a_log_H, dt_bias_H)
    o_1THV, final_BHVK = chunk_gated_delta_rule_opt_vk(
        q=q_ThK[None, rows].contiguous(),
        k=k_ThK[None, rows].contiguous(),
        v=v_THV[None, rows].contiguous(),
        g=g_TH[None],
        beta=beta_TH[None],
        initial_state=state[slots],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=state.new_tensor(starts, dtype=torch.int64),
        state_dtype=torch.float32,
    )
    state[slots] = final_BHVK
    out_THV[rows] = o_1THV[0]
    return out_THV
