"""The gated delta rule, row by row, in Triton: each program carries some value dimensions of one head's state.

It reads the state once and stores it once: after the last row, or with commits after so many of them.

Letters: T rows, H value heads, h key heads, r = H / h, K key head size, V value head size, B sequences.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rocm_serve.ops import tiles
from rocm_serve.ops.batch import Sequences
from rocm_serve.ops.gdn import L2_EPS
from rocm_serve.ops.triton_common.triton import arch


@triton.jit
def _softplus(x):
    """log(1 + exp(x)), exact also where exp(x) is lost beside 1; x itself above 20."""
    e = tl.exp(tl.minimum(x, 20.0))
    w = 1.0 + e
    return tl.where(x > 20.0, x, tl.where(w == 1.0, e, tl.log(w) * (e / (w - 1.0))))


@triton.jit
def unit(x, L2: tl.constexpr, SCALE: tl.constexpr):
    """Return a vector, held as [pieces, columns], with the length SCALE."""
    return x * (tl.rsqrt(tl.sum(tl.sum(x * x, 1), 0) + L2) * SCALE)


@triton.jit
def log_decay(gate, a_log, dt_bias):
    """Return g <= 0: a state decays by exp(g) in one row."""
    return -tl.exp(a_log.to(tl.float32)) * _softplus(gate.to(tl.float32) + dt_bias.to(tl.float32))


@triton.jit
def decay_of(gate, a_log, dt_bias):
    """Return exp(g), by which a state decays in one row."""
    return tl.exp(log_decay(gate, a_log, dt_bias))


@triton.jit
def span(row_starts, sequence, first_row, ONE: tl.constexpr):
    """Return a sequence's first row and the number of them. ONE: they have one each, from `first_row` on."""
    if ONE:
        first = (first_row + sequence).to(tl.int64)
        n = 1
    else:
        first = tl.load(row_starts + sequence).to(tl.int64)
        n = tl.load(row_starts + sequence + 1) - first
    return first, n


@triton.jit
def places(K: tl.constexpr, V: tl.constexpr, PIECES: tl.constexpr, KL: tl.constexpr, BV: tl.constexpr):
    """Say where a program's part of a head's state lies in the head, and what of it exists: [PIECES BV, KL].

    Two dimensions, so that the compiler has no choice: lanes go along the columns and then to other value dimensions.
    """
    place = tl.arange(0, PIECES * BV)
    value = (tl.program_id(0) * BV + place % BV)[:, None]
    key = (place // BV * KL)[:, None] + tl.arange(0, KL)[None, :]
    return value * K + key, (value < V) & (key < K)


@triton.jit
def advance(s, q, k, v, decay, strength):
    """Return the state after a row and what the row reads: s [pieces, V, columns], q and k [pieces, columns], v [V].

    Both products with the old state come first, so that they do not wait for each other:
    (exp(g) S + d k^T) q = exp(g) (S q) + d (k . q).
    """
    sk_V = tl.sum(tl.sum(s * k[:, None, :], 0), 1) * decay
    sq_V = tl.sum(tl.sum(s * q[:, None, :], 0), 1) * decay
    d_V = (v - sk_V) * strength
    s = s * decay + tl.expand_dims(tl.expand_dims(d_V, 1), 0) * k[:, None, :]
    return s, sq_V + d_V * tl.sum(tl.sum(k * q, 1), 0)


@triton.jit(do_not_specialize=["row_starts", "slots", "commits", "first_row", "heads", "shared"])
def gated_delta_rule_kernel(
    q, k, v, a, b, a_log, dt_bias, state, out, row_starts, slots, commits,
    first_row, heads, shared, q_row, k_row, v_row, a_row, b_row,
    L2: tl.constexpr, K: tl.constexpr, V: tl.constexpr, PIECES: tl.constexpr, KL: tl.constexpr, BV: tl.constexpr,
    ONE: tl.constexpr, COMMIT: tl.constexpr,
):  # fmt: skip
    """All rows of one sequence for some value dimensions of one head. The next row is loaded while one is computed.

    ONE: every sequence has one row, the first at `first_row`. A row of the state is read in pieces of KL columns: so
    few lanes share it, and its sums need few shuffles.
    """
    value = tl.program_id(0) * BV + tl.arange(0, BV)
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    slot = tl.load(slots + sequence).to(tl.int64)
    first, n = span(row_starts, sequence, first_row, ONE)
    if n <= 0:
        return
    key = tl.arange(0, PIECES)[:, None] * KL + tl.arange(0, KL)[None, :]
    is_key = key < K
    is_value = value < V
    inside, real = places(K, V, PIECES, KL, BV)
    held = state + (slot * heads + head) * V * K + inside
    s = tl.reshape(tl.load(held, mask=real, other=0.0), (PIECES, BV, KL))
    kept = tl.load(commits + sequence) if COMMIT else n

    k_at = k + (head // shared) * K + key
    q_at = q + (head // shared) * K + key
    v_at = v + head * V + value
    k_next = tl.load(k_at + first * k_row, mask=is_key, other=0.0)
    q_next = tl.load(q_at + first * q_row, mask=is_key, other=0.0)
    v_next = tl.load(v_at + first * v_row, mask=is_value, other=0.0)
    a_next = tl.load(a + first * a_row + head)
    b_next = tl.load(b + first * b_row + head)
    for i in range(0, n):
        k_K = unit(k_next.to(tl.float32), L2, 1.0)
        q_K = unit(q_next.to(tl.float32), L2, K**-0.5)
        v_V = v_next.to(tl.float32)
        decay = decay_of(a_next, tl.load(a_log + head), tl.load(dt_bias + head))
        strength = tl.sigmoid(b_next.to(tl.float32))
        row = first + tl.minimum(i + 1, n - 1)
        k_next = tl.load(k_at + row * k_row, mask=is_key, other=0.0)
        q_next = tl.load(q_at + row * q_row, mask=is_key, other=0.0)
        v_next = tl.load(v_at + row * v_row, mask=is_value, other=0.0)
        a_next = tl.load(a + row * a_row + head)
        b_next = tl.load(b + row * b_row + head)

        s, o_V = advance(s, q_K, k_K, v_V, decay, strength)
        here = (first + i) * heads + head
        tl.store(out + here * V + value, o_V.to(out.dtype.element_ty), mask=is_value)
        if COMMIT and i + 1 == kept:
            tl.store(held, tl.reshape(s, (PIECES * BV, KL)), mask=real)
    if not COMMIT:
        tl.store(held, tl.reshape(s, (PIECES * BV, KL)), mask=real)


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
    return scan("gdn_decode", q_ThK, k_ThK, v_THV, a_TH, b_TH, a_log_H, dt_bias_H, state, sequences, out_THV)


def scan(
    kernel: str,
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
    """Run the kernel with the tile that `kernel` has in ops/tiles.py; else as `gdn_decode`."""
    _, heads, value, key = state.shape
    key_heads = q_ThK.shape[1]
    assert state.dtype == torch.float32, f"the state is float32, not {state.dtype}"
    assert state.is_contiguous() and out_THV.is_contiguous()
    for x, size in ((q_ThK, key), (k_ThK, key), (v_THV, value)):
        assert x.stride(2) == 1 and (x.shape[1] == 1 or x.stride(1) == size), f"heads lie apart: {x.stride()}"
    assert heads == 1 or a_TH.stride(1) == b_TH.stride(1) == 1, "the gates of a row lie one after the other"
    if sequences.num_sequences:
        shape = {"rows": sequences.num_sequences, "heads": heads, "k": key, "v": value}
        tile = tiles.tile(kernel, shape, arch())
        one = one_row_each(sequences)
        gated_delta_rule_kernel[(triton.cdiv(value, tile["BV"]), heads, sequences.num_sequences)](
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
            sequences.row_starts[0],
            heads,
            heads // key_heads,
            *(x.stride(0) for x in (q_ThK, k_ThK, v_THV, a_TH, b_TH)),
            L2=L2_EPS,
            K=key,
            V=value,
            PIECES=max(1, triton.next_power_of_2(key) // tile["KL"]),
            ONE=one,
            COMMIT=sequences.commits_B is not None,
            **tile,
        )
    return out_THV


def one_row_each(sequences: Sequences) -> bool:
    """Say whether every sequence has one row: a decode step, whose kernels then need no row starts."""
    first = sequences.row_starts[0]
    return sequences.row_starts == tuple(range(first, first + sequences.num_sequences + 1))
