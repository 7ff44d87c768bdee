"""The gated delta rule, row by row, in Triton: each program carries some value dimensions of one head's state.

It reads the state once and stores it once: after the last row, or with commits after so many of them.

Letters: T rows, H value heads, h key heads, r = H / h, K key head size, V value head size, B sequences.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rocm_serve.ops.batch import Sequences
from rocm_serve.ops.gdn import L2_EPS

_TILE = 4096  # elements of the state in one program, in registers all the while


@triton.jit
def _softplus(x):
    """log(1 + exp(x)), exact also where exp(x) is lost beside 1; x itself above 20."""
    e = tl.exp(tl.minimum(x, 20.0))
    w = 1.0 + e
    return tl.where(x > 20.0, x, tl.where(w == 1.0, e, tl.log(w) * (e / (w - 1.0))))


@triton.jit(do_not_specialize=["row_starts", "slots", "commits", "heads", "shared"])
def gated_delta_rule_kernel(
    q, k, v, a, b, a_log, dt_bias, state, out, row_starts, slots, commits,
    heads, shared, q_row, k_row, v_row, a_row, b_row,
    L2: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    COMMIT: tl.constexpr,
):  # fmt: skip
    """All rows of one sequence for some value dimensions of one head. The next row is loaded while one is computed."""
    value = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    first = tl.load(row_starts + sequence).to(tl.int64)
    n = tl.load(row_starts + sequence + 1) - first
    if n <= 0:
        return
    key = tl.arange(0, BLOCK_K)
    is_key = key < K
    is_value = value < V
    real = is_value[:, None] & is_key[None, :]
    inside = value[:, None] * K + key[None, :]
    held = state + (tl.load(slots + sequence).to(tl.int64) * heads + head) * V * K + inside
    s = tl.load(held, mask=real, other=0.0)
    minus_rate = -tl.exp(tl.load(a_log + head).to(tl.float32))
    bias = tl.load(dt_bias + head).to(tl.float32)
    kept = tl.load(commits + sequence) if COMMIT else n

    k_at = k + (head // shared) * K + key
    q_at = q + (head // shared) * K + key
    v_at = v + head * V + value
    row = first
    k_next = tl.load(k_at + row * k_row, mask=is_key, other=0.0)
    q_next = tl.load(q_at + row * q_row, mask=is_key, other=0.0)
    v_next = tl.load(v_at + row * v_row, mask=is_value, other=0.0)
    a_next = tl.load(a + row * a_row + head)
    b_next = tl.load(b + row * b_row + head)
    for i in range(0, n):
        k_K = k_next.to(tl.float32)
        q_K = q_next.to(tl.float32)
        v_V = v_next.to(tl.float32)
        gate = a_next.to(tl.float32)
        strength = tl.sigmoid(b_next.to(tl.float32))
        row = first + tl.minimum(i + 1, n - 1)
        k_next = tl.load(k_at + row * k_row, mask=is_key, other=0.0)
        q_next = tl.load(q_at + row * q_row, mask=is_key, other=0.0)
        v_next = tl.load(v_at + row * v_row, mask=is_value, other=0.0)
        a_next = tl.load(a + row * a_row + head)
        b_next = tl.load(b + row * b_row + head)

        k_K = k_K * tl.rsqrt(tl.sum(k_K * k_K, 0) + L2)
        q_K = q_K * (tl.rsqrt(tl.sum(q_K * q_K, 0) + L2) * K**-0.5)
        s = s * tl.exp(minus_rate * _softplus(gate + bias))
        d_V = (v_V - tl.sum(s * k_K[None, :], 1)) * strength
        s = s + d_V[:, None] * k_K[None, :]
        o_V = tl.sum(s * q_K[None, :], 1)
        here = (first + i) * heads + head
        tl.store(out + here * V + value, o_V.to(out.dtype.element_ty), mask=is_value)
        if COMMIT and i + 1 == kept:
            tl.store(held, s, mask=real)
    if not COMMIT:
        tl.store(held, s, mask=real)


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
    """Advance each sequence's state row by row and write what the rows read: the reference's semantics.

    Rows of q, k, v, a and b may lie apart (slices of wider projections), the heads of a row may not.
    Numerics: fp32 inside, one rounding; n rows at once give the bits of n calls with one row.
    """
    _, heads, value, key = state.shape
    key_heads = q_ThK.shape[1]
    assert state.dtype == torch.float32, f"the state is float32, not {state.dtype}"
    assert state.is_contiguous() and out_THV.is_contiguous()
    for x, size in ((q_ThK, key), (k_ThK, key), (v_THV, value)):
        assert x.stride(2) == 1 and (x.shape[1] == 1 or x.stride(1) == size), f"heads lie apart: {x.stride()}"
    assert heads == 1 or a_TH.stride(1) == b_TH.stride(1) == 1, "the gates of a row lie one after the other"
    if sequences.num_sequences:
        block_k = triton.next_power_of_2(key)
        block_v = max(1, min(32, _TILE // block_k, triton.next_power_of_2(value)))
        gated_delta_rule_kernel[(triton.cdiv(value, block_v), heads, sequences.num_sequences)](
            q_ThK,
            k_ThK,
            v_THV,
            a_TH,
            b_TH,
            a_log_H,
            dt_bias_H,
            state,
            out_THV,
            sequences.row_starts_B1,
            sequences.slots_B,
            sequences.slots_B if sequences.commits_B is None else sequences.commits_B,
            heads,
            heads // key_heads,
            *(x.stride(0) for x in (q_ThK, k_ThK, v_THV, a_TH, b_TH)),
            L2=L2_EPS,
            K=key,
            V=value,
            BLOCK_K=block_k,
            BLOCK_V=block_v,
            COMMIT=sequences.commits_B is not None,
            # Every thread owns four elements or more of the state, on wavefronts of 64 too: no two own the same one.
            num_warps=max(1, min(4, block_v * block_k // 256)),
        )
    return out_THV
