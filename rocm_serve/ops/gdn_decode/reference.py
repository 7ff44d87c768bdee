"""The gated delta rule, row by row.

Letters: T rows, H value heads, h key heads, r = H / h, K key head size, V value head size.
"""

from __future__ import annotations

import torch

from rocm_serve.ops.batch import Sequences
from rocm_serve.ops.gdn import gates, unit
from rocm_serve.ops.rows import steady_


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
    """Advance each sequence's state row by row and write what the rows read to their rows of `out`.

    Shapes: q, k [T, h, K], v, out [T, H, V], a, b [T, H], A_log, dt_bias [H], state fp32 [slots + 1, H, V, K],
    advanced in place; value head i uses key head i // r -> out. Any number of rows a sequence. With `commits` the
    state is the one after so many rows of a sequence: the rows behind them, drafts, run on a copy.
    Numerics: fp32 inside, one rounding; n rows at once give the bits of n calls with one row.
    Source: S = exp(g) S; d = beta (v - S k); S += d k^T; o = S q, with q and k of length one and q / sqrt(K).
    """
    rows = sequences.rows
    slots, heads, value, key = state.shape
    key_heads = q_ThK.shape[1]
    assert state.dtype == torch.float32, f"the state is float32, not {state.dtype}"
    g, beta = gates(a_TH[rows], b_TH[rows], a_log_H, dt_bias_H)
    decay = steady_(torch.exp_, g)[..., None, None]
    k, v = unit(k_ThK[rows]), v_THV[rows].float()
    q = unit(q_ThK[rows]) * key**-0.5
    k_dot_q = (k * q).sum(-1).repeat_interleave(heads // key_heads, 1)
    kq = torch.stack((k, q), dim=2)
    for b, slot in enumerate(sequences.slots):
        s_HVK = state[slot]
        s_hvK = s_HVK.view(key_heads, -1, key)
        first, last = sequences.row_starts[b], sequences.row_starts[b + 1]
        draft = last if sequences.commits is None else first + sequences.commits[b]
        for row in range(first, last):
            if row == draft:
                s_HVK = s_HVK.clone()
                s_hvK = s_HVK.view(key_heads, -1, key)
            i = row - rows.start
            s_HVK *= decay[i]
            sk_HV, sq_HV = (x.reshape(heads, value) for x in torch.bmm(kq[i], s_hvK.transpose(1, 2)).unbind(1))
            d_HV = (v[i] - sk_HV) * beta[i, :, None]
            s_hvK.baddbmm_(d_HV.view(key_heads, -1, 1), k[i, :, None, :])
            out_THV[row] = (sq_HV + d_HV * k_dot_q[i, :, None]).to(out_THV.dtype)
    return out_THV
