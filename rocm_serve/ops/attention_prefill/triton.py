"""Causal attention over paged keys and values in Triton, for prompt rows.

The keys and values of a step's sequences are first copied from their pages to one run of rows each, in the dtype that
is multiplied: a tile of many query rows reads them again and again, and takes what lies together by descriptor where
the card has them (sm_90's tensor memory accelerator), and without arithmetic on addresses elsewhere.

Letters: T rows of the batch, H query heads, G key/value heads, r = H / G, D head size, P pages, S rows of a page,
B sequences, L copied keys; in kernels, M elements of a tile (its rows times r), N keys of a block.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from rocm_serve.ops.batch import Sequences
from rocm_serve.ops.tiles import tile
from rocm_serve.ops.tiles_prefill import KEY_UNIT, KEYS_AT_A_TIME, prefill_splits
from rocm_serve.ops.triton_common.triton import arch, blocks, places, tile_of

_LOG2_E = 1.4426950408889634

_COPIED = 32  # keys that a program copies
_UNIT = tl.constexpr(KEY_UNIT)  # what a sequence is padded to: whole blocks of any tile


@triton.jit
def _padded(n):
    return (n + _UNIT - 1) // _UNIT * _UNIT


@triton.jit
def _first_key(row_starts, contexts, b):
    """Return where the copied keys of sequence b begin: behind those of the sequences before it."""
    first = 0
    for some in range(0, b, 64):
        i = some + tl.arange(0, 64)
        before = i < b
        n = tl.load(row_starts + i + 1, mask=before, other=0) - tl.load(row_starts + i, mask=before, other=0)
        first += tl.sum(_padded(tl.load(contexts + i, mask=before, other=0) + n), 0)
    return first


@triton.jit
def _sequence_at(row_starts, contexts, key, SEQUENCES: tl.constexpr):
    """Return the sequence that a copied key belongs to, and how many keys of others are before its own.

    SEQUENCES itself, where the key lies behind all of them.
    """
    b = 0
    first = 0
    seen = 0
    for some in range(0, SEQUENCES, 64):
        i = some + tl.arange(0, 64)
        real = i < SEQUENCES
        n = tl.load(row_starts + i + 1, mask=real, other=0) - tl.load(row_starts + i, mask=real, other=0)
        keys = _padded(tl.load(contexts + i, mask=real, other=0) + n)
        before = real & (seen + tl.cumsum(keys, 0) <= key)
        b += tl.sum(before.to(tl.int32), 0)
        first += tl.sum(tl.where(before, keys, 0), 0)
        seen += tl.sum(keys, 0)
    return b, first


@triton.jit(do_not_specialize=["row_starts", "contexts", "table", "table_row", "page_size"])
def copy_keys_kernel(
    k_pages, v_pages, k_LW, v_LW, row_starts, contexts, table, table_row, page_size,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, KEYS: tl.constexpr, SEQUENCES: tl.constexpr,
):  # fmt: skip
    """KEYS keys and values of one sequence, all heads: WIDTH numbers each. Behind its last one there are zeros.

    SEQUENCES: how many share the programs of the grid, which find theirs; 0: the grid has a dimension for them.
    """
    b, start = tl.program_id(1), tl.program_id(0) * KEYS
    if SEQUENCES:
        b, before = _sequence_at(row_starts, contexts, start, SEQUENCES)
        start -= before
        if b >= SEQUENCES:
            return
    length = tl.load(contexts + b) + tl.load(row_starts + b + 1) - tl.load(row_starts + b)
    if start >= _padded(length):
        return
    key = start + tl.arange(0, KEYS)
    x = tl.arange(0, BLOCK)
    page = tl.load(table + b.to(tl.int64) * table_row + key // page_size, mask=key < length, other=0).to(tl.int64)
    at = ((page * page_size + key % page_size) * WIDTH)[:, None] + x[None, :]
    to = ((_first_key(row_starts, contexts, b) + key).to(tl.int64) * WIDTH)[:, None] + x[None, :]
    held = (key < length)[:, None] & (x < WIDTH)[None, :]
    k = tl.load(k_pages + at, mask=held, other=0.0)
    v = tl.load(v_pages + at, mask=held, other=0.0)
    tl.store(k_LW + to, k.to(k_LW.dtype.element_ty), mask=(x < WIDTH)[None, :])
    tl.store(v_LW + to, v.to(v_LW.dtype.element_ty), mask=(x < WIDTH)[None, :])


@triton.jit
def _block(
    x_LW, first, column, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, WIDTH: tl.constexpr,
    DESCRIBED: tl.constexpr,
):  # fmt: skip
    """Load one head of BLOCK_N copied keys or values."""
    if DESCRIBED:
        return x_LW.load([first, column])
    else:
        n = first + tl.arange(0, BLOCK_N)
        d = tl.arange(0, BLOCK_D)
        at = n[:, None] * WIDTH + column + d[None, :]
        if D == BLOCK_D:
            return tl.load(x_LW + at)
        else:
            return tl.load(x_LW + at, mask=(d < D)[None, :], other=0.0)


@triton.jit
def _fold(s_MN, v_ND, scale, peak_M, total_M, o_MD, DOT: tl.constexpr):
    """Fold one block of scores into the running softmax: return the new peak, sum of probabilities and output."""
    higher_M = tl.maximum(peak_M, tl.max(s_MN, 1) * scale)
    p_MN = tl.exp2(s_MN * scale - higher_M[:, None])
    shrink_M = tl.exp2(peak_M - higher_M)
    total_M = total_M * shrink_M + tl.sum(p_MN, 1)
    o_MD = tl.dot(p_MN.to(DOT), v_ND, o_MD * shrink_M[:, None], input_precision="ieee")
    return higher_M, total_M, o_MD


@triton.jit
def _span(length, splits, BLOCK_N: tl.constexpr):
    """Return how many keys a split of a sequence has: whole blocks, as many in each but its last."""
    return tl.cdiv(tl.cdiv(length, splits), BLOCK_N) * BLOCK_N


@triton.jit(do_not_specialize=["row_starts", "contexts", "before", "splits"])
def prefill_attention_kernel(
    q, k_LW, v_LW, out, peaks, totals, row_starts, contexts, before, splits, scale, v_scale, SPLIT: tl.constexpr,
    SHARED: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, DOT: tl.constexpr, DESCRIBED: tl.constexpr, STAGES: tl.constexpr, SEQUENCES: tl.constexpr,
):  # fmt: skip
    """Some rows of one sequence with the r query heads of one key/value head, over all keys or one split of them.

    Element m of a tile is its row m // r and head m % r. Blocks that all rows see come first, without a mask. Scores
    count in powers of two. The last rows of a sequence, which have most to do, begin first. With SPLIT `out` is fp32
    [rows, s, H, D], not yet divided by the sums of probabilities; these go to `totals`, the largest scores to `peaks`,
    both [rows, s, H]; what rows find that see no key of a split is not read. SEQUENCES: as copy_keys_kernel has it.
    """
    ROWS: tl.constexpr = BLOCK_M // SHARED
    WIDTH: tl.constexpr = GROUPS * D
    group, split = tl.program_id(0), tl.program_id(1) % splits
    tile = tl.num_programs(1) // splits - 1 - tl.program_id(1) // splits
    b, start = tile_of(row_starts, tl.program_id(2), tile, SEQUENCES, ROWS)
    first = tl.load(row_starts + b)
    n = tl.load(row_starts + b + 1) - first
    if start >= n:
        return
    context = tl.load(contexts + b)
    span = _span(context + n, splits, BLOCK_N)
    begin = split * span
    stop = tl.minimum(context + tl.minimum(start + ROWS, n), begin + span)
    if begin >= stop:
        return
    at = _first_key(row_starts, contexts, b)
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    row = start + m // SHARED
    real_MD = ((m < ROWS * SHARED) & (row < n))[:, None] & (d < D)[None, :]
    q_at = ((first + row).to(tl.int64) * (GROUPS * SHARED) + group * SHARED + m % SHARED) * D
    q_MD = tl.load(q + q_at[:, None] + d[None, :], mask=real_MD, other=0.0).to(DOT)
    position_M = context + tl.minimum(row, n - 1)
    peak_M = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    total_M = tl.zeros((BLOCK_M,), dtype=tl.float32)
    o_MD = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    seen_by_all = tl.minimum(tl.maximum((context + start + 1) // BLOCK_N * BLOCK_N, begin), begin + span)
    for key in tl.range(begin, seen_by_all, BLOCK_N, num_stages=STAGES):
        k_ND = _block(k_LW, at + key, group * D, D, BLOCK_D, BLOCK_N, WIDTH, DESCRIBED)
        s_MN = tl.dot(q_MD, k_ND.T, input_precision="ieee")
        v_ND = _block(v_LW, at + key, group * D, D, BLOCK_D, BLOCK_N, WIDTH, DESCRIBED)
        peak_M, total_M, o_MD = _fold(s_MN, v_ND, scale, peak_M, total_M, o_MD, DOT)
    for key in tl.range(seen_by_all, stop, BLOCK_N, num_stages=1):
        k_ND = _block(k_LW, at + key, group * D, D, BLOCK_D, BLOCK_N, WIDTH, DESCRIBED)
        s_MN = tl.dot(q_MD, k_ND.T, input_precision="ieee")
        s_MN = tl.where((key + tl.arange(0, BLOCK_N))[None, :] <= position_M[:, None], s_MN, float("-inf"))
        v_ND = _block(v_LW, at + key, group * D, D, BLOCK_D, BLOCK_N, WIDTH, DESCRIBED)
        peak_M, total_M, o_MD = _fold(s_MN, v_ND, scale, peak_M, total_M, o_MD, DOT)
    if SPLIT:
        head = group * SHARED + m % SHARED
        place_M = ((first + row - before).to(tl.int64) * splits + split) * (GROUPS * SHARED) + head
        is_row_M = (m < ROWS * SHARED) & (row < n)
        tl.store(peaks + place_M, peak_M, mask=is_row_M)
        tl.store(totals + place_M, total_M, mask=is_row_M)
        tl.store(out + (place_M * D)[:, None] + d[None, :], o_MD, mask=real_MD)
    else:
        o_MD *= (v_scale / total_M)[:, None]
        tl.store(out + q_at[:, None] + d[None, :], o_MD.to(out.dtype.element_ty), mask=real_MD)


@triton.jit(do_not_specialize=["row_starts", "contexts", "before", "splits"])
def add_splits_kernel(
    parts, peaks, totals, out, row_starts, contexts, before, splits, v_scale,
    H: tl.constexpr, D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    SEQUENCES: tl.constexpr,
):  # fmt: skip
    """All heads of one row: its splits, weighted by their sums of probabilities, added in order."""
    b, row = tile_of(row_starts, tl.program_id(1), tl.program_id(0), SEQUENCES, 1)
    first = tl.load(row_starts + b)
    n = tl.load(row_starts + b + 1) - first
    if row >= n:
        return
    context = tl.load(contexts + b)
    seen = tl.minimum((context + row) // _span(context + n, splits, BLOCK_N) + 1, splits)
    h, d = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    real_HD = (h < H)[:, None] & (d < D)[None, :]
    at = (first + row - before).to(tl.int64) * splits * H
    peak_H = tl.full((BLOCK_H,), float("-inf"), dtype=tl.float32)
    for split in range(seen):
        peak_H = tl.maximum(peak_H, tl.load(peaks + at + split * H + h, mask=h < H, other=0.0))
    total_H = tl.zeros((BLOCK_H,), dtype=tl.float32)
    o_HD = tl.zeros((BLOCK_H, BLOCK_D), dtype=tl.float32)
    for split in range(seen):
        place_H = at + split * H + h
        weight_H = tl.exp2(tl.load(peaks + place_H, mask=h < H, other=0.0) - peak_H)
        total_H += weight_H * tl.load(totals + place_H, mask=h < H, other=1.0)
        part_HD = tl.load(parts + (place_H * D)[:, None] + d[None, :], mask=real_HD, other=0.0)
        o_HD += weight_H[:, None] * part_HD
    o_HD *= (v_scale / total_H)[:, None]
    to = out + (((first + row).to(tl.int64) * H + h) * D)[:, None] + d[None, :]
    tl.store(to, o_HD.to(out.dtype.element_ty), mask=real_HD)


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
    summed in fp32; probabilities are rounded to bf16 before they meet the values, as flash attention's are. A row's
    bits depend on its query, its keys, the tile, and how many splits its sequences' keys are cut into: more than one
    where there are too few tiles for the card.
    Nothing is read on the device. Keys are copied for as many sequences at a time as `KEYS_AT_A_TIME` holds.
    """
    assert k_pages_PSGD.is_contiguous() and v_pages_PSGD.is_contiguous() and out_THD.is_contiguous()
    assert k_pages_PSGD.shape == v_pages_PSGD.shape and k_pages_PSGD.shape[3] == q_THD.shape[2]
    for run in _runs(sequences):
        counts = [b - a for a, b in zip(run.row_starts, run.row_starts[1:], strict=False)]
        if any(counts):
            _attend(q_THD.contiguous(), k_pages_PSGD, v_pages_PSGD, run, counts, out_THD, scale * k_scale, v_scale)
    return out_THD


def _runs(sequences: Sequences) -> Iterator[Sequences]:
    """Cut the sequences into runs whose keys may be copied together; one alone may have more."""
    starts = sequences.row_starts
    start, keys = 0, 0
    for b, context in enumerate(sequences.contexts):
        more = blocks(context + starts[b + 1] - starts[b], KEY_UNIT) * KEY_UNIT
        if b > start and keys + more > KEYS_AT_A_TIME:
            yield sequences.run(start, b)
            start, keys = b, 0
        keys += more
    yield sequences.run(start, sequences.num_sequences) if start else sequences


def _copy_keys(
    k_pages_PSGD: torch.Tensor,
    v_pages_PSGD: torch.Tensor,
    k_LW: torch.Tensor,
    v_LW: torch.Tensor,
    run: Sequences,
    longest: int,
) -> None:
    many, table, (_, width) = run.num_sequences, run.page_table_BP, k_LW.shape
    grid = (blocks(len(k_LW), _COPIED), 1) if run.shared else (blocks(longest, _COPIED), many)
    copy_keys_kernel[grid](
        *(k_pages_PSGD, v_pages_PSGD, k_LW, v_LW, run.row_starts_B1, run.contexts_B),
        *(table, table.stride(0), k_pages_PSGD.shape[1]),
        **{"WIDTH": width, "BLOCK": triton.next_power_of_2(width), "KEYS": _COPIED, "num_warps": 4},
        SEQUENCES=many if run.shared else 0,
    )


def _attend(
    q_THD: torch.Tensor,
    k_pages_PSGD: torch.Tensor,
    v_pages_PSGD: torch.Tensor,
    run: Sequences,
    counts: list[int],
    out_THD: torch.Tensor,
    scale: float,
    v_scale: float,
) -> None:
    heads, d = q_THD.shape[1:]
    groups = k_pages_PSGD.shape[2]
    width, shared, many, longest = groups * d, heads // groups, run.num_sequences, max(counts)
    wide = torch.float32 in (q_THD.dtype, k_pages_PSGD.dtype)
    dtype = torch.float32 if wide else torch.bfloat16  # bf16 holds every value of FP8 pages
    block_d = max(16, triton.next_power_of_2(d))
    shape = {"rows": longest, "vectors": triton.next_power_of_2(shared), "d": block_d, "bytes": dtype.itemsize}
    card = arch()
    chosen = tile("attention_prefill", shape, card)
    padded = [blocks(context + n, KEY_UNIT) * KEY_UNIT for context, n in zip(run.contexts, counts, strict=True)]
    where, finding = (run.row_starts_B1, run.contexts_B), {"SEQUENCES": many if run.shared else 0}
    k_LW, v_LW = q_THD.new_empty(2, sum(padded), width, dtype=dtype)
    _copy_keys(k_pages_PSGD, v_pages_PSGD, k_LW, v_LW, run, max(padded))
    block_m, block_n, described = chosen["BLOCK_M"], chosen["BLOCK_N"], chosen["DESCRIBED"] and d == block_d
    assert KEY_UNIT % block_n == 0 and block_m >= shared
    keys, values = k_LW, v_LW
    if described:
        keys, values = (TensorDescriptor.from_tensor(x, [block_n, d]) for x in (k_LW, v_LW))
    tiles, before = blocks(longest, block_m // shared), run.row_starts[0]
    if run.shared:
        tiles = places(sum(counts), many, block_m // shared)
    programs = groups * sum(blocks(n, block_m // shared) for n in counts)
    splits = prefill_splits(programs, max(padded), card)
    target, peaks, totals = out_THD, None, None
    if splits > 1:
        sizes = sum(counts), splits, heads
        target = torch.empty((*sizes, d), dtype=torch.float32, device=q_THD.device)
        # Each on its own: the second half of one tensor would be aligned or not, which a kernel is compiled for.
        peaks, totals = (torch.empty(sizes, dtype=torch.float32, device=q_THD.device) for _ in range(2))
    prefill_attention_kernel[(groups, tiles * splits, 1 if run.shared else many)](
        *(q_THD, keys, values, target, peaks, totals, *where, before, splits, float(scale * _LOG2_E), float(v_scale)),
        **{
            "SPLIT": splits > 1,
            "SHARED": shared,
            "GROUPS": groups,
            "D": d,
            "BLOCK_D": block_d,
            "BLOCK_M": block_m,
            "BLOCK_N": block_n,
            **finding,
        },
        **{"DOT": tl.float32 if wide else tl.bfloat16, "DESCRIBED": bool(described), "STAGES": chosen["num_stages"]},
        **{name: chosen[name] for name in ("num_warps", "num_stages")},
    )
    if splits > 1:
        add_splits_kernel[(places(sum(counts), many, 1), 1) if run.shared else (longest, many)](
            *(target, peaks, totals, out_THD, *where, before, splits, float(v_scale)),
            **{"H": heads, "D": d, "BLOCK_H": triton.next_power_of_2(heads), "BLOCK_D": block_d, "BLOCK_N": block_n},
            **finding,
        )
