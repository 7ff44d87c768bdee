"""The gated delta rule over prompt rows in Triton, 64 rows at a time on matrix cores.

One launch, or two, prepares all sub-chunks: what their rows do to each other, whatever the state. One carries the
states through them and writes what the rows read.

Letters: T rows, i, j rows of a sub-chunk, B sequences, H value heads, h key heads, K key head size, V value head size.
Sub-chunk c of sequence b has the place (row_starts[b] - row_starts[0]) // 64 + b + c in a workspace: no two share one,
and nobody has to count them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rocm_serve.ops import tiles
from rocm_serve.ops.batch import Sequences
from rocm_serve.ops.gdn import L2_EPS
from rocm_serve.ops.gdn_chunk.reference import CHUNK, FORGOTTEN
from rocm_serve.ops.gdn_decode.triton import log_decay, scan
from rocm_serve.ops.triton_common.triton import arch, blocks

_KEYS = 128  # longer keys go row by row: their tiles do not fit on a unit
# Vectors of a sub-chunk's rows: what scales the old state, what is written and queries; strength, exp of summed decay.
_FACTORS = 5
_SEQUENCES = 64  # whose row starts are looked at together
# What rows and states are multiplied as, and what squares of rows are: all of their elements are one or less.
_FACTOR_TYPES = {
    torch.bfloat16: (tl.bfloat16, torch.float16),
    torch.float32: (tl.float32, torch.float32),
}

_CHUNK, _FORGOTTEN, _VECTORS = tl.constexpr(CHUNK), tl.constexpr(FORGOTTEN), tl.constexpr(_FACTORS)


@triton.jit
def _sequence_of(row_starts, place, first_row, num_sequences, LANES: tl.constexpr):
    """Return the sequence whose sub-chunks begin at `place` or last before it."""
    begun = 0
    lane = tl.arange(0, LANES)
    for start in range(0, num_sequences, LANES):
        b = start + lane
        at = (tl.load(row_starts + b, mask=b < num_sequences, other=0) - first_row) // _CHUNK + b
        begun += tl.sum(((b < num_sequences) & (at <= place)).to(tl.int32), 0)
    return begun - 1


@triton.jit
def _to_unit(x, L2: tl.constexpr):
    """Return what scales each row of [rows, columns] to the length one."""
    wide = x.to(tl.float32)
    return tl.rsqrt(tl.sum(wide * wide, 1) + L2)


@triton.jit
def _inverted(system, i, j, DOT: tl.constexpr):
    """Invert I + a strictly lower [64, 64] whose row and column numbers are i and j.

    Inverses of diagonal blocks are merged to those of blocks twice as large: of [[A, 0], [C, B]] it is
    [[A', 0], [-B' C A', B']]. Their elements are products of contractions, at most one: float16 holds them.
    """
    r = tl.where(i == j, 1.0, 0.0) - tl.where(i // 2 == j // 2, system, 0.0).to(tl.float32)
    for level in tl.static_range(1, 6):
        inside = i // (2 << level) == j // (2 << level)
        apart = tl.where(inside & (i // (1 << level) != j // (1 << level)), system, 0.0)
        held = r.to(DOT)
        turned = tl.dot(apart, held, input_precision="ieee")
        r -= tl.dot(held, turned.to(DOT), input_precision="ieee")
    return r


@triton.jit(do_not_specialize=["row_starts", "first_row", "num_sequences", "heads", "shared"])
def gdn_chunk_prepare_kernel(
    q, k, a, b, a_log, dt_bias, solved, weights, factors, row_starts,
    first_row, num_sequences, heads, shared, q_row, k_row, a_row, b_row,
    L2: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, LANES: tl.constexpr, DOT: tl.constexpr,
    SOLVE: tl.constexpr,
):  # fmt: skip
    """One value head and one sub-chunk: the system of what its rows write, and what its queries read of that.

    `solved` and `weights` are [places, H, 64, 64], `factors` [places, H, 5, 64]. SOLVE: the system is solved here.
    """
    place, head = tl.program_id(0), tl.program_id(1)
    sequence = _sequence_of(row_starts, place, first_row, num_sequences, LANES)
    first = tl.load(row_starts + sequence)
    n = tl.load(row_starts + sequence + 1) - first
    begin = (place - (first - first_row) // _CHUNK - sequence) * _CHUNK
    if begin >= n:
        return
    rows = begin + tl.arange(0, _CHUNK)
    live = rows < n
    at = (first + rows).to(tl.int64)
    gate = tl.load(a + at * a_row + head, mask=live, other=0.0)
    g = tl.maximum(log_decay(gate, tl.load(a_log + head), tl.load(dt_bias + head)), _FORGOTTEN)
    grown = tl.cumsum(tl.where(live, g, 0.0), 0)
    strength = tl.sigmoid(tl.load(b + at * b_row + head, mask=live, other=0.0).to(tl.float32))
    strength = tl.where(live, strength, 0.0)

    key = tl.arange(0, BK)
    real, column = live[:, None] & (key < K)[None, :], (head // shared) * K + key
    k_iK = tl.load(k + (at * k_row)[:, None] + column[None, :], mask=real, other=0.0)
    k_unit = _to_unit(k_iK, L2)
    lane = factors + (place.to(tl.int64) * heads + head) * _VECTORS * _CHUNK + tl.arange(0, _CHUNK)
    since = tl.exp(grown)
    tl.store(lane, since * k_unit)
    tl.store(lane + _CHUNK, tl.exp(tl.min(grown, 0) - grown) * k_unit)
    tl.store(lane + 3 * _CHUNK, strength)
    tl.store(lane + 4 * _CHUNK, since)

    i, j = tl.arange(0, _CHUNK)[:, None], tl.arange(0, _CHUNK)[None, :]
    square = (place.to(tl.int64) * heads + head) * _CHUNK * _CHUNK + i * _CHUNK + j
    decay = tl.exp(tl.where(i >= j, grown[:, None] - grown[None, :], float("-inf"))) * k_unit[None, :]
    k_Kj = tl.trans(k_iK.to(DOT))
    kk = tl.dot(k_iK.to(DOT), k_Kj, input_precision="ieee")
    system = tl.where(i > j, kk * decay * (strength * k_unit)[:, None], 0.0)
    if not SOLVE:
        tl.store(solved + square, system.to(solved.dtype.element_ty))

    q_iK = tl.load(q + (at * q_row)[:, None] + column[None, :], mask=real, other=0.0)
    q_unit = _to_unit(q_iK, L2) * K**-0.5
    tl.store(lane + 2 * _CHUNK, since * q_unit)
    qk = tl.dot(q_iK.to(DOT), k_Kj, input_precision="ieee")
    tl.store(weights + square, (qk * decay * q_unit[:, None]).to(weights.dtype.element_ty))
    if SOLVE:
        r = _inverted(system.to(solved.dtype.element_ty), i, j, solved.dtype.element_ty) * strength[None, :]
        tl.store(solved + square, r.to(solved.dtype.element_ty))


@triton.jit
def gdn_chunk_solve_kernel(solved, factors, H: tl.constexpr):
    """Replace a sub-chunk's system by its inverse times the strengths: what rows write of what they would write alone.

    Together with the kernel before it takes so many registers that gfx runs one program of it at a time on a unit.
    """
    here = tl.program_id(0).to(tl.int64) * H + tl.program_id(1)
    i, j = tl.arange(0, _CHUNK)[:, None], tl.arange(0, _CHUNK)[None, :]
    square = solved + here * _CHUNK * _CHUNK + i * _CHUNK + j
    strength = tl.load(factors + here * _VECTORS * _CHUNK + 3 * _CHUNK + tl.arange(0, _CHUNK))
    system = tl.load(square)
    r = _inverted(system, i, j, solved.dtype.element_ty) * strength[None, :]
    tl.store(square, r.to(solved.dtype.element_ty))


@triton.jit
def _advanced(
    s_KV, q, k, v, solved, weights, factors, out, left, value,
    Q_ROW: tl.constexpr, K_ROW: tl.constexpr, V_ROW: tl.constexpr, OUT_ROW: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Return the state behind one sub-chunk, of which `left` rows exist; store what they read.

    What rows want to write is scaled by a power of two that makes the largest 256 or less: then float16 holds their
    sums, each at most 64 such numbers times at most one.
    """
    i, key = tl.arange(0, _CHUNK), tl.arange(0, BK)
    live, is_key, is_value = (i < left)[:, None], (key < K)[None, :], (value < V)[None, :]
    square = i[:, None] * _CHUNK + tl.arange(0, _CHUNK)[None, :]
    side: tl.constexpr = solved.dtype.element_ty
    k_iK = tl.load(k + i[:, None] * K_ROW + key[None, :], mask=live & is_key, other=0.0)
    q_iK = tl.load(q + i[:, None] * Q_ROW + key[None, :], mask=live & is_key, other=0.0)
    v_iV = tl.load(v + i[:, None] * V_ROW + value[None, :], mask=live & is_value, other=0.0)
    r_ij, p_ij = tl.load(solved + square), tl.load(weights + square)
    to_old, to_written = tl.load(factors + i), tl.load(factors + _CHUNK + i)
    to_query, decay = tl.load(factors + 2 * _CHUNK + i), tl.load(factors + _VECTORS * _CHUNK - 1)

    s_dot = s_KV.to(DOT)
    old_iV = tl.dot(k_iK.to(DOT), s_dot, input_precision="ieee")
    wanted_iV = v_iV.to(tl.float32) - old_iV * to_old[:, None]
    largest = tl.max(tl.abs(wanted_iV)).to(tl.int32, bitcast=True) & 0x7F800000
    largest = tl.maximum(largest, 0x08000000)
    shrink = (0x7B000000 - (largest - 0x08000000)).to(tl.float32, bitcast=True)
    grow = (largest - 0x04000000).to(tl.float32, bitcast=True)
    written_iV = tl.dot(r_ij, (wanted_iV * shrink).to(side), input_precision="ieee")
    o_iV = tl.dot(q_iK.to(DOT), s_dot, input_precision="ieee") * (to_query * shrink)[:, None]
    o_iV = tl.dot(p_ij, written_iV.to(side), o_iV, input_precision="ieee") * grow
    out_at = out + i[:, None] * OUT_ROW + value[None, :]
    tl.store(out_at, o_iV.to(out.dtype.element_ty), mask=live & is_value)
    kept_iV = (written_iV * (to_written * grow)[:, None]).to(DOT)
    return tl.dot(tl.trans(k_iK.to(DOT)), kept_iV, s_KV * decay, input_precision="ieee")


@triton.jit(do_not_specialize=["row_starts", "slots", "first_row"])
def gdn_chunk_scan_kernel(
    q, k, v, solved, weights, factors, state, out, row_starts, slots, first_row,
    H: tl.constexpr, SHARED: tl.constexpr, Q_ROW: tl.constexpr, K_ROW: tl.constexpr, V_ROW: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Some value dimensions of one head's state, from the first sub-chunk of a sequence to the last.

    Distances of rows are constants, so that a tile is loaded from one address and offsets: the address arithmetic of a
    sub-chunk is not much less work than its products.
    """
    value = tl.program_id(0) * BV + tl.arange(0, BV)
    head, sequence = tl.program_id(1), tl.program_id(2)
    first = tl.load(row_starts + sequence).to(tl.int64)
    n = (tl.load(row_starts + sequence + 1) - first).to(tl.int32)
    if n <= 0:
        return
    key = tl.arange(0, BK)
    slot = tl.load(slots + sequence).to(tl.int64)
    held = state + (slot * H + head) * V * K + value[None, :] * K + key[:, None]
    real = (key < K)[:, None] & (value < V)[None, :]
    s_KV = tl.load(held, mask=real, other=0.0)

    k += first * K_ROW + (head // SHARED) * K
    q += first * Q_ROW + (head // SHARED) * K
    v += first * V_ROW + head * V
    out += (first * H + head) * V
    here = ((first - first_row) // _CHUNK + sequence) * H + head
    solved += here * _CHUNK * _CHUNK
    weights += here * _CHUNK * _CHUNK
    factors += here * _VECTORS * _CHUNK
    for c in range(0, tl.cdiv(n, _CHUNK)):
        s_KV = _advanced(
            s_KV, q, k, v, solved, weights, factors, out, n - c * _CHUNK, value,
            Q_ROW, K_ROW, V_ROW, H * V, K, V, BK, BV, DOT,
        )  # fmt: skip
        k += _CHUNK * K_ROW
        q += _CHUNK * Q_ROW
        v += _CHUNK * V_ROW
        out += _CHUNK * H * V
        solved += H * _CHUNK * _CHUNK
        weights += H * _CHUNK * _CHUNK
        factors += H * _VECTORS * _CHUNK
    tl.store(held, s_KV, mask=real)


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

    float32 rows, which are for proofs, and long keys go row by row: exact, but without matrix instructions.
    """
    given = q_ThK, k_ThK, v_THV, a_TH, b_TH, a_log_H, dt_bias_H, state, sequences, out_THV
    if q_ThK.dtype == torch.float32 or q_ThK.shape[2] > _KEYS:
        return scan("gdn_scan", *given)
    return chunked(*given)


def chunked(
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
    """As `gdn_chunk`, by sub-chunks.

    Rows of q, k, v, a and b may lie apart (slices of wider projections), the heads of a row may not. For a while it
    holds 17 KiB for each sub-chunk and value head.
    Numerics: fp32 sums. Of bf16 rows, q, k, v enter as they are, the state is rounded to bf16 for each sub-chunk that
    reads it, and what a sub-chunk adds to it once; the rest is rounded to float16.
    """
    heads, value, key = state.shape[1:]
    assert state.dtype == torch.float32, f"the state is float32, not {state.dtype}"
    assert state.is_contiguous() and out_THV.is_contiguous()
    for x, size in ((q_ThK, key), (k_ThK, key), (v_THV, value)):
        assert x.stride(2) == 1 and (x.shape[1] == 1 or x.stride(1) == size), f"heads lie apart: {x.stride()}"
    assert heads == 1 or a_TH.stride(1) == b_TH.stride(1) == 1, "the gates of a row lie one after the other"
    if sequences.row_starts[-1] == sequences.row_starts[0]:
        return out_THV
    tile = tiles.tile("gdn_chunk", {"rows": sequences.num_sequences, "heads": heads, "k": key, "v": value}, arch())
    prepared = _prepared(q_ThK, k_ThK, a_TH, b_TH, a_log_H, dt_bias_H, sequences, tile)
    gdn_chunk_scan_kernel[(blocks(value, tile["BV"]), heads, sequences.num_sequences)](
        q_ThK,
        k_ThK,
        v_THV,
        *prepared,
        state,
        out_THV,
        sequences.row_starts_B1,
        sequences.slots_B,
        sequences.row_starts[0],
        H=heads,
        SHARED=heads // q_ThK.shape[1],
        Q_ROW=q_ThK.stride(0),
        K_ROW=k_ThK.stride(0),
        V_ROW=v_THV.stride(0),
        K=key,
        V=value,
        BK=_columns(key),
        BV=tile["BV"],
        DOT=_FACTOR_TYPES[q_ThK.dtype][0],
        num_warps=tile["num_warps"],
        num_stages=tile["num_stages"],
    )
    return out_THV


def _columns(key: int) -> int:
    return max(16, triton.next_power_of_2(key))


def _prepared(
    q_ThK: torch.Tensor,
    k_ThK: torch.Tensor,
    a_TH: torch.Tensor,
    b_TH: torch.Tensor,
    a_log_H: torch.Tensor,
    dt_bias_H: torch.Tensor,
    sequences: Sequences,
    tile: tiles.Tile,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what the scan needs of every sub-chunk: see the kernel."""
    first_row, count, heads = sequences.row_starts[0], sequences.num_sequences, a_TH.shape[1]
    places = (sequences.row_starts[-1] - first_row) // CHUNK + count
    dot, side = _FACTOR_TYPES[q_ThK.dtype]
    solved, weights = q_ThK.new_empty(2, places, heads, CHUNK, CHUNK, dtype=side)
    factors = q_ThK.new_empty(places, heads, _FACTORS, CHUNK, dtype=torch.float32)
    gdn_chunk_prepare_kernel[(places, heads)](
        q_ThK,
        k_ThK,
        a_TH,
        b_TH,
        a_log_H,
        dt_bias_H,
        solved,
        weights,
        factors,
        sequences.row_starts_B1,
        first_row,
        count,
        heads,
        heads // q_ThK.shape[1],
        *(x.stride(0) for x in (q_ThK, k_ThK, a_TH, b_TH)),
        L2=L2_EPS,
        K=q_ThK.shape[2],
        BK=_columns(q_ThK.shape[2]),
        LANES=_SEQUENCES,
        DOT=dot,
        SOLVE=not tile["SPLIT"],
        num_warps=4,
    )
    if tile["SPLIT"]:
        gdn_chunk_solve_kernel[(places, heads)](solved, factors, H=heads, num_warps=4)
    return solved, weights, factors
