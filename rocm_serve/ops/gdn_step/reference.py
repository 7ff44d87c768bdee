"""Rows past the prompt through Gated DeltaNet, from the projection to the gated norm.

Letters: T rows, C = 2 h K + H V channels, H value heads, h key heads, K key head size, V value head size.
"""

from __future__ import annotations

import torch

from rocm_serve.ops.batch import Sequences
from rocm_serve.ops.causal_conv.reference import causal_conv
from rocm_serve.ops.gated_rms_norm.reference import gated_rms_norm
from rocm_serve.ops.gdn_decode.reference import gdn_decode


def gdn_step(
    u_TC: torch.Tensor,
    conv_weight_CK: torch.Tensor,
    conv_state: torch.Tensor,
    a_TH: torch.Tensor,
    b_TH: torch.Tensor,
    a_log_H: torch.Tensor,
    dt_bias_H: torch.Tensor,
    state: torch.Tensor,
    z_THV: torch.Tensor,
    norm_weight_V: torch.Tensor,
    sequences: Sequences,
    *,
    eps: float,
    activation: str,
) -> torch.Tensor:
    """Convolve, advance each sequence's state row by row, normalise and gate what the rows read.

    Shapes: u [T, C] (q, k, v), taps [C, 4], conv_state [slots + 1, 3, C], a, b, A_log, dt_bias and state as of
    gdn_decode, z [T, H, V], norm_weight [V] -> [T, H, V], dtype of z; rows outside the sequences come out as zeros.
    Both states are rewritten in place, with `commits` to those after so many rows.
    Errors: ValueError for an activation other than "silu" and "sigmoid".
    Numerics: those of causal_conv, gdn_decode and gated_rms_norm one after the other, with their roundings.
    """
    _, heads, value, key = state.shape
    keys = (u_TC.shape[1] - heads * value) // 2
    mixed_TC = causal_conv(u_TC, conv_weight_CK, conv_state, sequences)
    q, k, v = mixed_TC.split([keys, keys, heads * value], dim=-1)
    read_THV = torch.zeros(z_THV.shape, dtype=u_TC.dtype, device=u_TC.device)
    as_keys, as_values = (len(u_TC), -1, key), (len(u_TC), heads, value)
    rule = q.view(as_keys), k.view(as_keys), v.view(as_values), a_TH, b_TH, a_log_H, dt_bias_H
    gdn_decode(*rule, state, sequences, read_THV)
    y_THV, rows = torch.zeros_like(z_THV), sequences.rows
    y_THV[rows] = gated_rms_norm(read_THV[rows], z_THV[rows], norm_weight_V, eps=eps, activation=activation)
    return y_THV
