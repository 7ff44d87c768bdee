"""Causal attention of rows past the prompt in Triton: keys read once, in splits that fill the card, merged in order.

Letters: T rows of the batch, H query heads, G key/value heads, r = H / G, D head size, P pages, S rows of a page,
B sequences; in kernels, Q query vectors of a tile (its rows times r, padded), M = 2 Q, N keys of a block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rocm_serve.ops.batch import Sequences
from rocm_serve.ops.tiles import tile
from rocm_serve.ops.triton_common.triton import arch, begin, following

_LOG2_E = 1.4426950408889634
_MERGED = 4096  # numbers that a program of the merge adds
_VECTORS = 32  # query vectors of a tile, unless one row has more
_FP8 = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e4m3fnuz: tl.float8e4b8}


@triton.jit
def _span(length, splits, BLOCK_N: tl.constexpr):
    """Return how many keys a split of a sequence has: whole blocks, as many in each but its last."""
    return tl.cdiv(tl.cdiv(length, splits), BLOCK_N) * BLOCK_N


@triton.jit
def _power(x):
    """Return the power of two at or below each x >= 0, 1 for a zero: dividing by it loses no bit."""
    bits = x.to(tl.int32, bitcast=True) & 0x7F800000
    return tl.where(bits == 0, 0x3F800000, bits).to(tl.float32, bitcast=True)


@triton.jit
def _queries(q, at, real, scale, d, D: tl.constexpr, KEY: tl.constexpr, DOT: tl.constexpr, FP8: tl.constexpr):
    """Load query vectors as they are multiplied, and the factor of their scores: fp16 holds less than bf16."""
    mask = real & tl.expand_dims(d < D, 1 - KEY)
    x = tl.load(q + at + tl.expand_dims(d, 1 - KEY), mask=mask, other=0.0)
    if FP8 is None:
        return x.to(DOT), scale
    else:
        power = tl.expand_dims(_power(tl.max(tl.abs(x.to(tl.float32)), KEY)), KEY)
        return (x.to(tl.float32) / power).to(DOT), power * scale


@triton.jit
def _tile(pages, at, d, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load dimensions `d` of the vectors at `at`; those from D on are zeros."""
    if D == BLOCK_D:
        return tl.load(pages + at + d)
    else:
        return tl.load(pages + at + d, mask=d < D, other=0.0)


@triton.jit
def _values(v, at, h, D: tl.constexpr, BLOCK_D: tl.constexpr, DOT: tl.constexpr, FP8: tl.constexpr):
    """Load values as two tiles of half the dimensions: the lower and the upper ones, or the even and the odd ones.

    What a matrix instruction takes transposed from shared memory comes in units of 16 bits: so FP8 numbers travel as
    pairs and part in registers.
    """
    if FP8 is None:
        low = _tile(v, at * D, h, D, BLOCK_D)
        return low.to(DOT), _tile(v, at * D, h + BLOCK_D // 2, D, BLOCK_D).to(DOT)
    else:
        pair = _tile(v, at * (D // 2), h, D // 2, BLOCK_D // 2)
        even = pair.to(tl.uint16, bitcast=True).to(tl.uint8).to(FP8, bitcast=True)
        odd = (pair.to(tl.uint16, bitcast=True) >> 8).to(tl.uint8).to(FP8, bitcast=True)
        return even.to(DOT), odd.to(DOT)


@triton.jit
def _product(left, right, total, KEY: tl.constexpr):
    """Return left right + total; of tiles that are transposed, right left + total."""
    if KEY == 1:
        return tl.dot(left, right, total, input_precision="ieee")
    else:
        return tl.dot(right, left, total, input_precision="ieee")


@triton.jit
def _probabilities(s, is_first, peak_M, total, KEY: tl.constexpr, DOT: tl.constexpr):
    """Return what a block of scores adds to the running softmax, and by how much what was there shrinks.

    `total` is summed over the keys when all blocks are done.
    """
    higher_M = tl.maximum(peak_M, tl.max(s, KEY))
    base_M = tl.where(higher_M == float("-inf"), 0.0, higher_M)  # a row may see no key of its split
    p = tl.exp2(s - tl.expand_dims(base_M, KEY))
    shrink = tl.expand_dims(tl.exp2(peak_M - base_M), KEY)
    rounded = p.to(DOT)
    parts = tl.where(is_first, rounded, (p - rounded.to(tl.float32)).to(DOT))
    return parts, shrink, higher_M, total * shrink + p


@triton.jit
def _vectors(vector, start, n, group, SHARED: tl.constexpr, ROWS: tl.constexpr):
    """Return the row and the head of query vectors, and which of them there are."""
    row = start + vector // SHARED
    return row, group * SHARED + vector % SHARED, (vector < ROWS * SHARED) & (row < n)


@triton.jit
def _store(o, d, to_Q, factor_Q, is_vector_Q, D: tl.constexpr, KEY: tl.constexpr):
    """Add the two halves of a tile's query vectors and store them."""
    size: tl.constexpr = to_Q.shape[0]
    if KEY == 1:
        x = tl.sum(tl.reshape(o, (2, size, d.shape[0])), 0)
    else:
        x = tl.sum(tl.reshape(o, (d.shape[0], 2, size)), 1)
    x *= tl.expand_dims(factor_Q, KEY)
    real = tl.expand_dims(is_vector_Q, KEY) & tl.expand_dims(d < D, 1 - KEY)
    to = tl.expand_dims(to_Q, KEY) + tl.expand_dims(d, 1 - KEY)
    tl.store(to, x.to(to.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["row_starts", "contexts", "table", "table_row", "before", "splits"])
def decode_attention_kernel(
    q, k_pages, v_pages, out, peaks, totals,
    row_starts, contexts, table, table_row, before, splits, score_scale, v_scale,
    PAGE: tl.constexpr, SHARED: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, KEY: tl.constexpr, DOT: tl.constexpr,
    FP8: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """ROWS rows of one sequence with the r query heads of one key/value head, over one split of the keys.

    Every query vector stands twice in a tile: matrix instructions have 16 rows or more, and r is 8 in the models. The
    first half meets probabilities rounded to DOT, the second what the rounding lost: exact, for the price of one. KEY:
    axis of the keys in a tile of scores, 1, or 0 for instructions whose first factor has 64 rows. FP8: dtype of such
    pages, whose values come as int16 pairs. Scores count in powers of two. With splits `out` is fp32 [T, s, H, D], not
    yet divided by the sums of probabilities; these go to `totals`, the largest scores to `peaks`, both [T, s, H].
    """
    begin(PDL)
    split, start = tl.program_id(0) % splits, tl.program_id(0) // splits * ROWS
    group, groups, b = tl.program_id(1), tl.num_programs(1), tl.program_id(2)
    first = tl.load(row_starts + b)
    n = tl.load(row_starts + b + 1) - first
    if start >= n:
        return
    context = tl.load(contexts + b)
    span = _span(context + n, splits, BLOCK_N)
    stop = tl.minimum(context + tl.minimum(start + ROWS, n), split * span + span)
    if split * span >= stop:
        return
    m = tl.arange(0, 2 * BLOCK_Q)
    row, head, is_vector = _vectors(m % BLOCK_Q, start, n, group, SHARED, ROWS)
    at = tl.expand_dims(((first + row).to(tl.int64) * groups * SHARED + head) * D, KEY)
    d, h = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_D // 2)
    x, scale = _queries(q, at, tl.expand_dims(is_vector, KEY), score_scale, d, D, KEY, DOT, FP8)
    position = tl.expand_dims(context + tl.minimum(row, n - 1), KEY)
    peak_M = tl.full((2 * BLOCK_Q,), float("-inf"), dtype=tl.float32)
    zeros = tl.zeros((2 * BLOCK_Q, BLOCK_N) if KEY == 1 else (BLOCK_N, 2 * BLOCK_Q), dtype=tl.float32)
    o_1 = tl.zeros((2 * BLOCK_Q, BLOCK_D // 2) if KEY == 1 else (BLOCK_D // 2, 2 * BLOCK_Q), dtype=tl.float32)
    total, o_2 = zeros, o_1
    for block in range(split * span, stop, BLOCK_N):
        key = block + tl.arange(0, BLOCK_N)
        held = tl.minimum(key, stop - 1)  # keys past the end are those of the last one once more, and not visible
        page = tl.load(table + b.to(tl.int64) * table_row + held // PAGE).to(tl.int64)
        kv_at = (page * PAGE + held % PAGE) * groups + group
        k = _tile(k_pages, tl.expand_dims(kv_at, 1 - KEY) * D, tl.expand_dims(d, KEY), D, BLOCK_D)
        v_1, v_2 = _values(v_pages, tl.expand_dims(kv_at, KEY), tl.expand_dims(h, 1 - KEY), D, BLOCK_D, DOT, FP8)
        s = _product(x, k.to(DOT), zeros, KEY) * scale
        s = tl.where(tl.expand_dims(key, 1 - KEY) <= position, s, float("-inf"))
        p, shrink, peak_M, total = _probabilities(s, tl.expand_dims(m < BLOCK_Q, KEY), peak_M, total, KEY, DOT)
        o_1, o_2 = _product(p, v_1, o_1 * shrink, KEY), _product(p, v_2, o_2 * shrink, KEY)
    row, head, is_vector = _vectors(tl.arange(0, BLOCK_Q), start, n, group, SHARED, ROWS)
    total_Q = tl.max(tl.reshape(tl.sum(total, KEY), (2, BLOCK_Q)), 0)  # both halves have the same
    if SPLIT:
        place = (first + row - before).to(tl.int64) * splits + split
        factor_Q = tl.full((BLOCK_Q,), 1.0, dtype=tl.float32)
        tl.store(peaks + place * groups * SHARED + head, tl.max(tl.reshape(peak_M, (2, BLOCK_Q)), 0), mask=is_vector)
        tl.store(totals + place * groups * SHARED + head, total_Q, mask=is_vector)
    else:
        place, factor_Q = (first + row).to(tl.int64), v_scale / total_Q
    to = out + (place * groups * SHARED + head) * D
    _store(o_1, h if FP8 is None else 2 * h, to, factor_Q, is_vector, D, KEY)
    _store(o_2, h + BLOCK_D // 2 if FP8 is None else 2 * h + 1, to, factor_Q, is_vector, D, KEY)


@triton.jit(do_not_specialize=["row_starts", "contexts", "before", "splits", "heads"])
def merge_splits_kernel(
    parts, peaks, totals, out, row_starts, contexts, before, splits, heads, v_scale,
    BLOCK_S: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr, PART_D: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Some dimensions of one head of one row: its splits, weighted by their sums of probabilities, added at once."""
    begin(PDL)
    row = tl.program_id(0)
    head = tl.program_id(1) % heads
    d = tl.program_id(1) // heads * PART_D + tl.arange(0, PART_D)
    b = tl.program_id(2)
    first = tl.load(row_starts + b)
    n = tl.load(row_starts + b + 1) - first
    if row >= n:
        return
    context = tl.load(contexts + b)
    split = tl.arange(0, BLOCK_S)
    live = (split < splits) & (split * _span(context + n, splits, BLOCK_N) <= context + row)
    at_S = ((first + row - before).to(tl.int64) * splits + split) * heads + head
    peak_S = tl.load(peaks + at_S, mask=live, other=float("-inf"))
    weight_S = tl.exp2(peak_S - tl.max(peak_S, 0))
    total = tl.sum(weight_S * tl.load(totals + at_S, mask=live, other=0.0), 0)
    part_SD = tl.load(parts + (at_S * D)[:, None] + d[None, :], mask=live[:, None] & (d < D)[None, :], other=0.0)
    o_D = tl.sum(weight_S[:, None] * part_SD, 0) / total * v_scale
    to = out + ((first + row).to(tl.int64) * heads + head) * D + d
    tl.store(to, o_D.to(out.dtype.element_ty), mask=d < D)


def _dot_dtype(q: torch.Tensor, pages: torch.Tensor, arch: str) -> tl.dtype:
    """Choose what is multiplied; every choice holds both factors exactly, float32 needs itself.

    NVIDIA turns FP8 numbers into fp16 in one instruction, into bf16 in four.
    """
    if torch.float32 in (q.dtype, pages.dtype):
        return tl.float32
    return tl.float16 if pages.dtype.itemsize == 1 and not arch.startswith("gfx") else tl.bfloat16


def attention_decode(
    q_THD: torch.Tensor,
    k_pages_PSGD: torch.Tensor,
    v_pages_PSGD: torch.Tensor,
    sequences: Sequences,
    out_THD: torch.Tensor,
    *,
    scale: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    """Write softmax(scale q k) v of the sequences' rows to their rows of `out`: the reference's semantics.

    Numerics: float32 rows or pages are multiplied in float32. Otherwise products are summed in fp32: of bf16, or
    beside FP8 pages on NVIDIA of fp16 ones, queries then divided by a power of two. Probabilities enter as a sum of two
    such numbers. One rounding. How the keys are split depends on the number of sequences, rounded up to a power of two,
    and on the card: so do the last bits.
    Nothing is read on the host but the numbers of rows: with one row a sequence the call can be captured in a graph.
    """
    heads, d = q_THD.shape[1:]
    page_size, groups = k_pages_PSGD.shape[1:3]
    assert k_pages_PSGD.is_contiguous() and v_pages_PSGD.is_contiguous() and out_THD.is_contiguous()
    assert k_pages_PSGD.shape == v_pages_PSGD.shape and k_pages_PSGD.shape[3] == d
    starts = sequences.row_starts
    longest = max((b - a for a, b in zip(starts, starts[1:], strict=False)), default=0)
    if not longest:
        return out_THD
    card = arch()
    dot = _dot_dtype(q_THD, k_pages_PSGD, card)
    fp8 = None if dot == tl.float32 else _FP8.get(k_pages_PSGD.dtype)
    values = v_pages_PSGD if fp8 is None else v_pages_PSGD.view(torch.int16)
    shared, many = heads // groups, sequences.num_sequences
    rows = min(longest, max(1, _VECTORS // shared))
    block_d, block_q = max(16, triton.next_power_of_2(d)), max(8, triton.next_power_of_2(rows * shared))
    itemsize = 4 if dot == tl.float32 else k_pages_PSGD.itemsize
    shape = {"rows": many, "vectors": block_q, "groups": groups, "d": block_d, "bytes": itemsize}
    chosen = tile("attention_decode", shape, card)
    splits, block_n = chosen["SPLITS"], chosen["BLOCK_N"]
    target, peaks, totals = out_THD, None, None
    if splits > 1:
        sizes = (starts[-1] - starts[0], splits, heads)
        target = torch.empty((*sizes, d), dtype=torch.float32, device=q_THD.device)
        peaks, totals = torch.empty((2, *sizes), dtype=torch.float32, device=q_THD.device)
    where = (sequences.row_starts_B1, sequences.contexts_B)
    table, before = sequences.page_table_BP, starts[0]
    decode_attention_kernel[(triton.cdiv(longest, rows) * splits, groups, many)](
        *(q_THD.contiguous(), k_pages_PSGD, values, target, peaks, totals, *where),
        *(table, table.stride(0), before, splits, float(scale * k_scale * _LOG2_E), float(v_scale)),
        **{"PAGE": page_size, "SHARED": shared, "ROWS": rows, "SPLIT": splits > 1, "D": d, "BLOCK_D": block_d},
        **{"BLOCK_Q": block_q, "BLOCK_N": block_n, "KEY": chosen["KEY"], "DOT": dot, "FP8": fp8},
        **{name: chosen[name] for name in ("num_warps", "num_stages")} | following(),
    )
    if splits > 1:
        block_s = triton.next_power_of_2(splits)
        part_d = min(block_d, max(16, _MERGED // block_s))
        merge_splits_kernel[(longest, heads * triton.cdiv(d, part_d), many)](
            *(target, peaks, totals, out_THD, *where, before, splits, heads, float(v_scale)),
            **{"BLOCK_S": block_s, "BLOCK_N": block_n, "D": d, "PART_D": part_d} | following(),
        )
    return out_THD
