"""The gated delta rule over prompt rows in Triton: the same scan that serves recurrent rows.

Letters: T rows, H value heads, h key heads, K key head size, V value head size.
"""

from __future__ import annotations

import torch

from rocm_serve.ops.batch import Sequences
from rocm_serve.ops.gdn_decode.triton import scan


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
    """Advance each sequence's state over its prompt rows and write what they read: the reference's semantics.

    One launch scans all sequences and heads, row after row with the state in registers. It is exact and does not see
    chunk borders at all, but leaves the matrix cores idle.
    """
    return scan("gdn_chunk", q_ThK, k_ThK, v_THV, a_TH, b_TH, a_log_H, dt_bias_H, state, sequences, out_THV)
