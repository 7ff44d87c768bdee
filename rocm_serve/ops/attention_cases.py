"""Inputs of both attention ops: paged keys and values of several sequences."""

from __future__ import annotations

import torch

from rocm_serve.ops.contract import Arguments
from rocm_serve.ops.inputs import normal, sequences_of


def attention_case(
    g: torch.Generator,
    dtype: torch.dtype,
    *,
    rows: tuple[int, ...],
    contexts: tuple[int, ...],
    heads: int = 8,
    kv_heads: int = 2,
    d: int = 64,
    page_size: int = 16,
    stored: torch.dtype | None = None,
    scale: float | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    first_row: int = 0,
) -> Arguments:
    """Build one case. Pages that no sequence owns, and rows past a sequence's end, hold NaN."""
    sequences, pages = sequences_of(g, rows, contexts, page_size=page_size, first_row=first_row)
    total = sequences.row_starts[-1] + 3
    held = [torch.full((pages, page_size, kv_heads, d), float("nan")) for _ in range(2)]
    for b, (n, context) in enumerate(zip(rows, contexts, strict=True)):
        for at in range(n + context):
            page = int(sequences.page_table_BP[b, at // page_size])
            for x in held:
                x[page, at % page_size] = normal(g, kv_heads, d)
    return {
        "q_THD": normal(g, total, heads, d, dtype=dtype),
        "k_pages_PSGD": held[0].to(stored or dtype),
        "v_pages_PSGD": held[1].to(stored or dtype),
        "sequences": sequences,
        "out_THD": torch.zeros(total, heads, d, dtype=dtype),
        "scale": d**-0.5 if scale is None else scale,
        "k_scale": k_scale,
        "v_scale": v_scale,
    }
