"""Causal attention of prompt rows by AITER.

Letters: T rows of the batch, n rows and L keys of the sequences of one call, H query heads, G key/value heads, D head
size, P pages, S rows of a page.

Keys and values are gathered from their pages first: AITER's paged forms are limited in page size and dtype at head
size 256, or read past the end of their page list.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from aiter.ops.mha import flash_attn_varlen_func

from rocm_serve.ops.batch import Sequences

_MOST_KEYS = 1 << 18  # gathered for one call, unless one sequence alone has more: 0.25 GiB of each at G * D = 512


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
    """Write softmax(scale q k) v of the sequences' rows to their rows of `out`; see the reference."""
    for run, lengths in _runs(sequences, _MOST_KEYS):
        index_L, starts_B1 = _places(run, lengths, k_pages_PSGD.shape[1])
        out_THD[run.rows] = flash_attn_varlen_func(
            q=q_THD[run.rows].contiguous(),
            k=_gather(k_pages_PSGD, index_L, k_scale, q_THD.dtype),
            v=_gather(v_pages_PSGD, index_L, v_scale, q_THD.dtype),
            cu_seqlens_q=run.row_starts_B1 - run.row_starts[0],
            cu_seqlens_k=starts_B1,
            max_seqlen_q=max(_counts(run)),
            max_seqlen_k=max(lengths),
            softmax_scale=scale,
            causal=True,
        )
    return out_THD


def _runs(sequences: Sequences, most: int) -> Iterator[tuple[Sequences, list[int]]]:
    """Cut the sequences into runs of up to `most` keys that have rows, each with the lengths of its sequences."""
    lengths = [c + n for c, n in zip(sequences.contexts, _counts(sequences), strict=True)]
    start = 0
    while start < len(lengths):
        stop, keys = start + 1, lengths[start]
        while stop < len(lengths) and keys + lengths[stop] <= most:
            keys += lengths[stop]
            stop += 1
        run = sequences.run(start, stop)
        if run.rows.start < run.rows.stop:
            yield run, lengths[start:stop]
        start = stop


def _counts(sequences: Sequences) -> list[int]:
    return [last - first for first, last in zip(sequences.row_starts, sequences.row_starts[1:], strict=False)]


def _places(sequences: Sequences, lengths: list[int], page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return where each key lies, page * S + offset, int64 [L], and where each sequence's keys begin, int32 [B + 1]."""
    table = sequences.page_table_BP
    held = table.new_tensor(lengths, dtype=torch.int64)
    ends = held.cumsum(0)
    sequence_L = torch.repeat_interleave(held, output_size=sum(lengths))
    at_L = torch.arange(sum(lengths), device=table.device) - (ends - held)[sequence_L]
    index_L = table[sequence_L, at_L // page_size].long() * page_size + at_L % page_size
    starts = torch.zeros(len(lengths) + 1, dtype=torch.int32, device=table.device)
    starts[1:] = ends
    return index_L, starts


def _gather(pages_PSGD: torch.Tensor, index_L: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    rows = pages_PSGD.view(-1, *pages_PSGD.shape[2:])
    if pages_PSGD.dtype.itemsize == 1:
        return rows.view(torch.uint8)[index_L].view(pages_PSGD.dtype).to(dtype).mul_(scale)  # exact, then one rounding
    return rows[index_L].to(dtype)
