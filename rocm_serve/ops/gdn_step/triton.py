"""Rows past the prompt through Gated DeltaNet in Triton: convolution, rule, norm and gate, mostly in one launch.

Each program carries some value dimensions of one head's state: it reads the state once and stores it once. With tiles
of whole heads it normalises what it read as well.

Letters: T rows, C = 2 h K + H V channels, H value heads, h key heads, K key head size, V value head size, B sequences.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rocm_serve.ops import tiles
from rocm_serve.ops.batch import Sequences
from rocm_serve.ops.gated_rms_norm.triton import gated_rms_norm
from rocm_serve.ops.gdn import L2_EPS
from rocm_serve.ops.gdn_decode.triton import advance, decay_of, one_row_each, places, span
from rocm_serve.ops.triton_common.triton import Counters, arch, following, let_next_begin, wait_for_previous

_TAPS = 4
_arrived = Counters()


@triton.jit
def _four_rows(u_at, window_at, i, channel, exists, tap, channels, u_row):
    """Load rows i - 3 to i of a sequence, [..., 4]: its own, and before row 0 the three in the window."""
    at = i - 3 + tap
    new = tl.load(u_at + at.to(tl.int64) * u_row + channel, mask=exists & (at >= 0), other=0.0)
    old = tl.load(window_at + (at + 3) * channels + channel, mask=exists & (at < 0) & (at >= -3), other=0.0)
    return tl.where(at >= 0, new, old.to(new.dtype))


@triton.jit
def _convolved(x, weight, channel, exists, tap):
    """Return SiLU of four rows [..., 4] under their taps, rounded as the rows are."""
    w = tl.load(weight + channel * 4 + tap, mask=exists & (tap >= 0), other=0.0)
    total = tl.sum(x.to(tl.float32) * w.to(tl.float32), len(x.shape) - 1)
    return (total * tl.sigmoid(total)).to(x.dtype).to(tl.float32)


@triton.jit
def _keep(window_at, x, channel, exists, tap, channels):
    """Write the last three of four rows to the window."""
    to = window_at + (tap - 1) * channels + channel
    tl.store(to, x.to(window_at.dtype.element_ty), mask=exists & (tap > 0))


@triton.jit
def _units(qk, L2: tl.constexpr, K: tl.constexpr):
    """Return q of length K**-0.5 and k of length one from [pieces, columns, 2]."""
    squared = tl.sum(tl.sum(qk * qk, 1), 0)
    length = tl.where(tl.arange(0, 2) == 0, K**-0.5, 1.0)
    return tl.split(qk * (tl.rsqrt(squared + L2) * length)[None, None, :])


@triton.jit
def _is_last(counter, sharing):
    """Count this program among those that share a counter; say whether it is the last, and then leave zero.

    What a program has read before goes into stores that it has issued, in every thread: it has arrived. So the count
    orders nothing, and need not wait for those stores.
    """
    tl.debug_barrier()
    last = tl.atomic_add(counter, 1, sem="relaxed") == sharing - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
def _begin_where_not(ONE: tl.constexpr, PDL: tl.constexpr):
    """Let the kernel after this one in, and wait for those before unless every sequence has one row."""
    let_next_begin(PDL)
    wait_for_previous(PDL and not ONE)


@triton.jit
def _is_empty(y_at, is_value, slot, n, ONE: tl.constexpr):
    """Say whether a sequence has no rows or, where all have one, is padding on the dummy slot: zeros then."""
    if ONE:
        empty = slot == 0
        zeros = tl.zeros(is_value.shape, tl.int64)
        tl.store(y_at, zeros.to(y_at.dtype.element_ty), mask=is_value & (zeros == slot))
    else:
        empty = n <= 0
    return empty


@triton.jit
def _gated(o_V, z_at, w_at, is_value, eps, V: tl.constexpr, SILU: tl.constexpr):
    gate = tl.load(z_at, mask=is_value, other=0.0).to(tl.float32)
    opened = tl.sigmoid(gate)
    if SILU:
        opened *= gate
    weight = tl.load(w_at, mask=is_value, other=0.0).to(tl.float32)
    return o_V * tl.rsqrt(tl.sum(o_V * o_V, 0) / V + eps) * weight * opened


@triton.jit(do_not_specialize=["row_starts", "slots", "commits", "first_row", "heads", "key_heads"])
def gdn_step_kernel(
    u, weight, window, a, b, a_log, dt_bias, state, z, norm_weight, y, row_starts, slots, commits, arrived,
    first_row, heads, key_heads, channels, u_row, a_row, b_row, z_row, eps,
    L2: tl.constexpr, K: tl.constexpr, V: tl.constexpr, PIECES: tl.constexpr, KL: tl.constexpr, BV: tl.constexpr,
    ONE: tl.constexpr, COMMIT: tl.constexpr, NORM: tl.constexpr, SILU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """All rows of one sequence for some value dimensions of one head. ONE: every sequence has one row.

    Programs that share a key head read the same windows of q and k: the last one to be through with them rewrites them.
    q and k are convolved as one tensor with four rows: smaller ones would be loaded for every lane of the state.
    """
    value = tl.program_id(0) * BV + tl.arange(0, BV)
    head, sequence = tl.program_id(1), tl.program_id(2)
    _begin_where_not(ONE, PDL)
    slot = tl.load(slots + sequence).to(tl.int64)
    first, n = span(row_starts, sequence, first_row, ONE)
    key = tl.arange(0, PIECES)[:, None] * KL + tl.arange(0, KL)[None, :]
    inside, real = places(K, V, PIECES, KL, BV)
    held = state + (slot * heads + head) * V * K + inside
    real = real & (tl.zeros(real.shape, tl.int64) < slot)
    s = tl.reshape(tl.load(held, mask=real, other=0.0), (PIECES, BV, KL))
    wait_for_previous(PDL and ONE)  # an earlier step has left the state: it is on its way before the rows are there
    if _is_empty(y + (first * heads + head) * V + value, value < V, slot, n, ONE):
        return
    kept = tl.load(commits + sequence) if COMMIT else n
    key_head, part = head // (heads // key_heads), tl.arange(0, 2)[None, None, :]  # parts: q, k
    qk_channel = ((part * key_heads + key_head) * K + key[:, :, None])[:, :, :, None]
    is_value, is_key = value < V, (key < K)[:, :, None, None]
    v_channel = (2 * key_heads * K + head * V + value)[:, None]
    tap, v_tap = tl.arange(0, 4)[None, None, None, :], tl.arange(0, 4)[None, :]
    window_at, u_at = window + slot * 3 * channels, u + first * u_row
    qk_rows = _four_rows(u_at, window_at, 0, qk_channel, is_key, tap, channels, u_row)
    v_rows = _four_rows(u_at, window_at, 0, v_channel, is_value[:, None], v_tap, channels, u_row)
    for i in range(0, n):
        row = first + i
        decay = decay_of(tl.load(a + row * a_row + head), tl.load(a_log + head), tl.load(dt_bias + head))
        strength = tl.sigmoid(tl.load(b + row * b_row + head).to(tl.float32))
        v_V = _convolved(v_rows, weight, v_channel, is_value[:, None], v_tap)
        q_K, k_K = _units(_convolved(qk_rows, weight, qk_channel, is_key, tap), L2, K)
        s, o_V = advance(s, q_K, k_K, v_V, decay, strength)
        if ONE:
            tl.store(held, tl.reshape(s, (PIECES * BV, KL)), mask=real)
        if NORM:
            o_V = o_V.to(u.dtype.element_ty).to(tl.float32)
            o_V = _gated(o_V, z + row * z_row + head * V + value, norm_weight + value, is_value, eps, V, SILU)
        tl.store(y + (row * heads + head) * V + value, o_V.to(y.dtype.element_ty), mask=is_value)
        if COMMIT and i + 1 == kept:
            tl.store(held, tl.reshape(s, (PIECES * BV, KL)), mask=real)
        if not ONE:
            qk_rows = _four_rows(u_at, window_at, i + 1, qk_channel, is_key, tap, channels, u_row)
            v_rows = _four_rows(u_at, window_at, i + 1, v_channel, is_value[:, None], v_tap, channels, u_row)
    if not ONE:
        if not COMMIT:
            tl.store(held, tl.reshape(s, (PIECES * BV, KL)), mask=real)
        qk_rows = _four_rows(u_at, window_at, kept - 1, qk_channel, is_key, tap, channels, u_row)
        v_rows = _four_rows(u_at, window_at, kept - 1, v_channel, is_value[:, None], v_tap, channels, u_row)

    if _is_last(arrived + sequence * key_heads + key_head, heads // key_heads * tl.num_programs(0)):
        _keep(window_at, qk_rows, qk_channel, is_key, tap, channels)
    _keep(window_at, v_rows, v_channel, is_value[:, None], v_tap, channels)


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
    """Convolve, advance each sequence's state, normalise and gate: the reference's semantics and roundings.

    Rows of u, a, b and z may lie apart (slices of wider projections). A second launch normalises where the tile cuts
    heads. Sequences of one row on the dummy slot are padding: zeros come out, and its state stays as it is.
    """
    if activation not in ("silu", "sigmoid"):
        raise ValueError(f"gated_rms_norm knows the activations silu and sigmoid, not {activation!r}")
    _, heads, value, key = state.shape
    _check(u_TC, conv_weight_CK, conv_state, a_TH, b_TH, state, z_THV)
    count, rows = sequences.num_sequences, sequences.rows
    make = torch.empty if rows.stop - rows.start == len(u_TC) else torch.zeros
    y_THV = make(z_THV.shape, dtype=z_THV.dtype, device=z_THV.device)
    if not count:
        return y_THV
    one = sequences.commits_B is None and one_row_each(sequences)
    kernel, shape = "gdn_step" if one else "gdn_step_drafts", {"rows": count, "heads": heads, "k": key, "v": value}
    tile = tiles.tile(kernel, shape, arch())
    whole = tile["BV"] >= value
    read_THV = y_THV if whole else torch.empty(z_THV.shape, dtype=u_TC.dtype, device=u_TC.device)
    key_heads = (u_TC.shape[1] - heads * value) // (2 * key)
    gdn_step_kernel[(triton.cdiv(value, tile["BV"]), heads, count)](
        *(u_TC, conv_weight_CK, conv_state, a_TH, b_TH, a_log_H, dt_bias_H, state, z_THV, norm_weight_V, read_THV),
        *(sequences.row_starts_B1, sequences.slots_B),
        sequences.slots_B if sequences.commits_B is None else sequences.commits_B,
        _arrived.of(count * key_heads, u_TC.device),
        *(rows.start, heads, key_heads, u_TC.shape[1], *(x.stride(0) for x in (u_TC, a_TH, b_TH, z_THV)), eps),
        L2=L2_EPS,
        K=key,
        V=value,
        PIECES=max(1, triton.next_power_of_2(key) // tile["KL"]),
        ONE=one,
        COMMIT=sequences.commits_B is not None,
        NORM=whole,
        SILU=activation == "silu",
        **tile,
        **following(),
    )
    if whole:
        return y_THV
    gated = gated_rms_norm(read_THV[rows], z_THV[rows], norm_weight_V, eps=eps, activation=activation)
    if len(gated) == len(y_THV):
        return gated
    y_THV[rows] = gated
    return y_THV


def _check(
    u_TC: torch.Tensor,
    conv_weight_CK: torch.Tensor,
    conv_state: torch.Tensor,
    a_TH: torch.Tensor,
    b_TH: torch.Tensor,
    state: torch.Tensor,
    z_THV: torch.Tensor,
) -> None:
    _, heads, value, _ = state.shape
    assert state.dtype == torch.float32, f"the state is float32, not {state.dtype}"
    assert conv_weight_CK.shape[1] == _TAPS, f"{conv_weight_CK.shape[1]} taps, the kernel takes {_TAPS}"
    assert state.is_contiguous() and conv_state.is_contiguous() and conv_weight_CK.is_contiguous()
    assert u_TC.stride(1) == 1, "the channels of a row lie one after the other"
    assert z_THV.stride(2) == 1 and (heads == 1 or z_THV.stride(1) == value), f"heads lie apart: {z_THV.stride()}"
    assert heads == 1 or a_TH.stride(1) == b_TH.stride(1) == 1, "the gates of a row lie one after the other"
