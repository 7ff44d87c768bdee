"""Causal attention over paged keys and values in Triton, for prompt rows.

Letters: T rows of the batch, H query heads, G key/value heads, r = H / G, D head size, P pages, S rows of a page,
B sequences; in kernels, M elements of a tile (its rows times r), N keys of a block.
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
    base_M = tl.where(higher_M == float("-inf"), 0.0, higher_M)  # rows of nothing see no key
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


@triton.jit(do_not_specialize=["row_starts", "contexts", "table", "table_row", "page_size", "shared"])
def paged_attention_kernel(
    q, k_pages, v_pages, out,
    row_starts, contexts, table, table_row, page_size, shared, score_scale, v_scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    DOT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Some rows of one sequence with the r query heads of one key/value head, over all keys.

    Element m of a tile is its row m // r and head m % r.
    """
    group = tl.program_id(1)
    b = tl.program_id(2)
    groups = tl.num_programs(1)
    first = tl.load(row_starts + b)
    n = tl.load(row_starts + b + 1) - first
    rows = BLOCK_M // shared
    start = tl.program_id(0) * rows
    if start >= n:
        return
    context = tl.load(contexts + b)
    stop = context + tl.minimum(start + rows, n)
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
    for block in range(0, stop, BLOCK_N):
        key = block + tl.arange(0, BLOCK_N)
        page = tl.load(table + b.to(tl.int64) * table_row + key // page_size, mask=key < stop, other=0).to(tl.int64)
        kv_at = ((page * page_size + key % page_size) * groups + group) * D
        k_DN = tl.load(k_pages + kv_at[None, :] + d[:, None], mask=(key < stop)[None, :] & (d < D)[:, None], other=0.0)
        v_ND = tl.load(v_pages + kv_at[:, None] + d[None, :], mask=(key < stop)[:, None] & (d < D)[None, :], other=0.0)
        visible_MN = key[None, :] <= position_M[:, None]
        peak_M, total_M, o_MD = _fold(q_MD, k_DN, v_ND, visible_MN, peak_M, total_M, o_MD, score_scale, DOT, WIDE)
    o_MD = o_MD / total_M[:, None] * v_scale
    tl.store(out + at_M[:, None] * D + d[None, :], o_MD.to(out.dtype.element_ty), mask=real)


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
    heads, d = q_THD.shape[1:]
    page_size, groups = k_pages_PSGD.shape[1:3]
    assert k_pages_PSGD.is_contiguous() and v_pages_PSGD.is_contiguous() and out_THD.is_contiguous()
    assert k_pages_PSGD.shape == v_pages_PSGD.shape and k_pages_PSGD.shape[3] == d
    starts = sequences.row_starts
    longest = max((b - a for a, b in zip(starts, starts[1:], strict=False)), default=0)
    if not longest:
        return out_THD
    dot = dot_dtype(q_THD, k_pages_PSGD, v_pages_PSGD)
    chosen = tile(d, heads // groups, longest, dot)
    table = sequences.page_table_BP
    tiles = triton.cdiv(longest, chosen["BLOCK_M"] // (heads // groups))
    paged_attention_kernel[(tiles, groups, sequences.num_sequences)](
        *(q_THD.contiguous(), k_pages_PSGD, v_pages_PSGD, out_THD, sequences.row_starts_B1, sequences.contexts_B),
        *(table, table.stride(0), page_size, heads // groups, float(scale * k_scale), float(v_scale)),
        **chosen,
        D=d,
        DOT=dot,
        WIDE=dot == tl.float32,
        num_warps=4,
        num_stages=1,
    )
    return out_THD
