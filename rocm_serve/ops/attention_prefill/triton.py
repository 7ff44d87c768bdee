"""Causal attention over paged keys and values in Triton, for prompt rows and for rows past the prompt.

Letters: T rows of the batch, H query heads, G key/value heads, r = H / G, D head size, P pages, S rows of a page,
B sequences; in kernels, M elements of a tile (its rows times r), N keys of a block, s splits of the keys.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rocm_serve.ops.batch import Sequences


def dot_dtype(*tensors: torch.Tensor) -> tl.dtype:
    """Choose what is multiplied: bf16 holds every value of bf16 rows and of FP8 pages; float32 needs itself."""
    return tl.float32 if any(x.dtype == torch.float32 for x in tensors) else tl.bfloat16


def tile(d: int, shared: int, longest: int, dot: tl.dtype) -> dict[str, int]:
    """Choose the tile for `longest` rows a sequence. K, V and the scores of a block fit into 64 KiB of LDS.

    float32 is for proofs, not for speed: without matrix instructions a tile is unrolled into fused multiply-adds.
    """
    block_d = max(16, triton.next_power_of_2(d))
    if dot == tl.float32:
        m, n = 16, 32 if block_d <= 64 else 16
    else:
        m, n = 16 if longest * shared <= 16 else 64, 64 if block_d <= 128 else 32
    return {"BLOCK_D": block_d, "BLOCK_M": max(m, triton.next_power_of_2(shared)), "BLOCK_N": n}


@triton.jit
def _fold(q_MD, k_DN, v_ND, visible_MN, peak_M, total_M, o_MD, score_scale, DOT: tl.constexpr, WIDE: tl.constexpr):
    """Fold one block of keys into the running softmax: return the new peak, sum of probabilities and output."""
    s_MN = tl.dot(q_MD, k_DN.to(DOT), input_precision="ieee") * score_scale
    s_MN = tl.where(visible_MN, s_MN, float("-inf"))
    higher_M = tl.maximum(peak_M, tl.max(s_MN, 1))
    base_M = tl.where(higher_M == float("-inf"), 0.0, higher_M)  # a row may see no key of its split
    p_MN = tl.exp(s_MN - base_M[:, None])
    shrink_M = tl.exp(peak_M - base_M)
    total_M = total_M * shrink_M + tl.sum(p_MN, 1)
    o_MD = o_MD * shrink_M[:, None]
    if WIDE:
        o_MD = tl.dot(p_MN, v_ND.to(DOT), o_MD, input_precision="ieee")
    else:  # in two parts: probabilities of 8 bits would be a second rounding of the result
        high_MN = p_MN.to(DOT)
        o_MD = tl.dot(high_MN, v_ND.to(DOT), o_MD)
        o_MD = tl.dot((p_MN - high_MN.to(tl.float32)).to(DOT), v_ND.to(DOT), o_MD)
    return higher_M, total_M, o_MD


@triton.jit(
    do_not_specialize=["row_starts", "contexts", "table", "table_row", "page_size", "shared", "before", "splits"]
)
def paged_attention_kernel(
    q, k_pages, v_pages, out, peaks, totals,
    row_starts, contexts, table, table_row, page_size, shared, before, splits, score_scale, v_scale,
    SPAN: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    DOT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Some rows of one sequence with the r query heads of one key/value head, over all keys or one split of them.

    Element m of a tile is its row m // r and head m % r. With SPAN (else 0) `out` is fp32 [s, rows, H, D], not yet
    divided by the sums of probabilities; these go to `totals`, the largest scores to `peaks`, both [s, rows, H].
    """
    split = tl.program_id(0) % splits
    group = tl.program_id(1)
    b = tl.program_id(2)
    groups = tl.num_programs(1)
    first = tl.load(row_starts + b)
    n = tl.load(row_starts + b + 1) - first
    rows = BLOCK_M // shared
    start = tl.program_id(0) // splits * rows
    if start >= n:
        return
    context = tl.load(contexts + b)
    begin = split * SPAN
    stop = context + tl.minimum(start + rows, n)
    if SPAN > 0:
        stop = tl.minimum(stop, begin + SPAN)
    if begin >= stop:
        return
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    row = start + m // shared
    is_row = (m < rows * shared) & (row < n)
    real = is_row[:, None] & (d < D)[None, :]
    at_M = (first + row).to(tl.int64) * groups * shared + group * shared + m % shared
    q_MD = tl.load(q + at_M[:, None] * D + d[None, :], mask=real, other=0.0).to(DOT)
    position_M = context + tl.minimum(row, n - 1)
    peak_M = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    total_M = tl.zeros((BLOCK_M,), dtype=tl.float32)
    o_MD = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    for block in range(begin, stop, BLOCK_N):
        key = block + tl.arange(0, BLOCK_N)
        page = tl.load(table + b.to(tl.int64) * table_row + key // page_size, mask=key < stop, other=0).to(tl.int64)
        kv_at = ((page * page_size + key % page_size) * groups + group) * D
        k_DN = tl.load(k_pages + kv_at[None, :] + d[:, None], mask=(key < stop)[None, :] & (d < D)[:, None], other=0.0)
        v_ND = tl.load(v_pages + kv_at[:, None] + d[None, :], mask=(key < stop)[:, None] & (d < D)[None, :], other=0.0)
        visible_MN = key[None, :] <= position_M[:, None]
        peak_M, total_M, o_MD = _fold(q_MD, k_DN, v_ND, visible_MN, peak_M, total_M, o_MD, score_scale, DOT, WIDE)
    if SPAN > 0:
        rows_of_all = tl.load(row_starts + tl.num_programs(2)) - before
        at_M += (split.to(tl.int64) * rows_of_all - before) * groups * shared
        tl.store(peaks + at_M, peak_M, mask=is_row)
        tl.store(totals + at_M, total_M, mask=is_row)
    else:
        o_MD = o_MD / total_M[:, None] * v_scale
    tl.store(out + at_M[:, None] * D + d[None, :], o_MD.to(out.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["row_starts", "contexts", "before", "heads"])
def merge_splits_kernel(
    parts, peaks, totals, out, row_starts, contexts, before, heads, v_scale,
    SPAN: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Some heads of one row: its splits, weighted by their sums of probabilities. Splits past the row are not read."""
    row = tl.program_id(0)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    b = tl.program_id(2)
    first = tl.load(row_starts + b)
    if row >= tl.load(row_starts + b + 1) - first:
        return
    splits = (tl.load(contexts + b) + row) // SPAN + 1
    rows_of_all = (tl.load(row_starts + tl.num_programs(2)) - before).to(tl.int64)
    d = tl.arange(0, BLOCK_D)[None, :]
    is_head = head < heads
    real = is_head[:, None] & (d < D)
    peak_H = tl.full((BLOCK_H,), float("-inf"), dtype=tl.float32)
    for split in range(0, splits):
        at_H = (split * rows_of_all + first + row - before) * heads + head
        peak_H = tl.maximum(peak_H, tl.load(peaks + at_H, mask=is_head, other=0.0))
    total_H = tl.zeros((BLOCK_H,), dtype=tl.float32)
    o_HD = tl.zeros((BLOCK_H, BLOCK_D), dtype=tl.float32)
    for split in range(0, splits):
        at_H = (split * rows_of_all + first + row - before) * heads + head
        weight_H = tl.exp(tl.load(peaks + at_H, mask=is_head, other=0.0) - peak_H)
        total_H += weight_H * tl.load(totals + at_H, mask=is_head, other=1.0)
        o_HD += weight_H[:, None] * tl.load(parts + at_H[:, None] * D + d, mask=real, other=0.0)
    to_HD = ((first + row).to(tl.int64) * heads + head)[:, None] * D + d
    tl.store(out + to_HD, (o_HD / total_H[:, None] * v_scale).to(out.dtype.element_ty), mask=real)


def attend(
    q_THD: torch.Tensor,
    k_pages_PSGD: torch.Tensor,
    v_pages_PSGD: torch.Tensor,
    sequences: Sequences,
    out_THD: torch.Tensor,
    *,
    scale: float,
    k_scale: float,
    v_scale: float,
    span: int | None,
) -> torch.Tensor:
    """Write causal attention of the sequences' rows to their rows of `out`.

    `span`: the keys of a sequence are split after so many and the splits merged by a second launch, which few rows
    with long contexts need to fill a GPU; None: each tile of rows walks all its keys.
    """
    heads, d = q_THD.shape[1:]
    page_size, groups = k_pages_PSGD.shape[1:3]
    assert k_pages_PSGD.is_contiguous() and v_pages_PSGD.is_contiguous() and out_THD.is_contiguous()
    assert k_pages_PSGD.shape == v_pages_PSGD.shape and k_pages_PSGD.shape[3] == d
    counts = [b - a for a, b in zip(sequences.row_starts, sequences.row_starts[1:], strict=False)]
    longest = max(counts, default=0)
    if not longest:
        return out_THD
    dot = dot_dtype(q_THD, k_pages_PSGD, v_pages_PSGD)
    chosen = tile(d, heads // groups, longest, dot)
    keys = max(context + count for context, count in zip(sequences.contexts, counts, strict=True))
    splits = 1 if span is None else triton.cdiv(keys, span)
    part: dict[str, int] = {"SPAN": span if splits > 1 and span else 0, "D": d, "BLOCK_D": chosen["BLOCK_D"]}
    target, peaks, totals = out_THD, None, None
    if splits > 1:
        sizes = (splits, sum(counts), heads)
        target = torch.empty((*sizes, d), dtype=torch.float32, device=q_THD.device)
        peaks, totals = torch.empty((2, *sizes), dtype=torch.float32, device=q_THD.device)
    where = (sequences.row_starts_B1, sequences.contexts_B)
    table = sequences.page_table_BP
    before = sequences.row_starts[0]
    tiles = triton.cdiv(longest, chosen["BLOCK_M"] // (heads // groups))
    inputs = (q_THD.contiguous(), k_pages_PSGD, v_pages_PSGD)
    sizes_of_step = (table.stride(0), page_size, heads // groups, before, splits)
    paged_attention_kernel[(tiles * splits, groups, sequences.num_sequences)](
        *(*inputs, target, peaks, totals, *where, table, *sizes_of_step, float(scale * k_scale), float(v_scale)),
        **(part | chosen),
        DOT=dot,
        WIDE=dot == tl.float32,
        num_warps=4,
        num_stages=1,
    )
    if splits > 1:
        some = max(1, 512 // chosen["BLOCK_D"])
        merge_splits_kernel[(longest, triton.cdiv(heads, some), sequences.num_sequences)](
            *(target, peaks, totals, out_THD, *where, before, heads, float(v_scale)), **part, BLOCK_H=some, num_warps=1
        )
    return out_THD


def attention_prefill(
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

    Numerics: float32 rows or pages are multiplied in float32. Otherwise bf16 products, exact also for FP8 pages, are
    summed in fp32; probabilities enter as a sum of two bf16 numbers. One rounding.
    """
    return attend(
        q_THD,
        k_pages_PSGD,
        v_pages_PSGD,
        sequences,
        out_THD,
        scale=scale,
        k_scale=k_scale,
        v_scale=v_scale,
        span=None,
    )
