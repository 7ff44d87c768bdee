"""The gated delta rule, row by row, by AITER, states V-major.

Letters: T rows, B sequences, n rows of a sequence, H value heads, h key heads, K key head size, V value head size.
"""

from __future__ import annotations

import torch
from aiter.ops.triton.gated_delta_net.fused_rearrange_sigmoid_gdr import fused_rearrange_sigmoid_gated_delta_rule

from rocm_serve.ops.batch import Sequences


def gdn_decode(
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
    """Advance each sequence's state row by row and write what the rows read to their rows of `out`; see the reference.

    AITER stores the state after every row, where a table of rows says: in the sequence's slot, so the last one stays;
    nowhere, -1, for rows behind `commits`. It reads the state where the first row's is to be stored, so that of a
    sequence which commits none is put back.
    """
    assert state.dtype == torch.float32, f"the state is float32, not {state.dtype}"
    rows = sequences.rows
    if rows.start == rows.stop:
        return out_THV
    longest = max(last - first for first, last in zip(sequences.row_starts, sequences.row_starts[1:], strict=False))
    slots_BN = sequences.slots_B[:, None].repeat(1, longest)
    untouched: list[int] = []
    if sequences.commits is not None and sequences.commits_B is not None:
        untouched = [slot for slot, commit in zip(sequences.slots, sequences.commits, strict=True) if not commit]
        row_N = torch.arange(longest, device=state.device)
        slots_BN = slots_BN.masked_fill(row_N >= sequences.commits_B[:, None].clamp_min(1), -1)
    before = state[untouched] if untouched else None
    _, heads, value, key = state.shape
    qkv_TC = torch.cat([x[rows].flatten(1) for x in (q_ThK, k_ThK, v_THV)], dim=1)
    o, _ = fused_rearrange_sigmoid_gated_delta_rule(
        A_log=a_log_H,
        a=a_TH[rows].contiguous(),
        b=b_TH[rows].contiguous(),
        dt_bias=dt_bias_H,
        qkv=qkv_TC,
        key_dim=q_ThK.shape[1] * key,
        value_dim=heads * value,
        head_k_dim=key,
        head_v_dim=value,
        initial_state=state,
        inplace_final_state=True,
        cu_seqlens=(sequences.row_starts_B1 - rows.start).long(),
        ssm_state_indices=slots_BN,
        use_qk_l2norm_in_kernel=True,
    )
    out_THV[rows] = o.view(-1, heads, value)
    if before is not None:
        state[untouched] = before
    return out_THV
