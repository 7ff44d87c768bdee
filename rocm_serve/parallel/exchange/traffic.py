"""Bytes that one rank sends in one MoE layer, by exchange. Pure. Prints Qwen3.8's with `python -m` on this module.

What stays on a rank is not counted, and what libraries add for themselves is not either. A gather is counted as its own
rows to each other rank, a sum over ranks as the ring's two passes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb

EXCHANGES = ("local", "torch", "all_gather", "mori")


@dataclass(frozen=True, slots=True)
class RowBytes:
    """`record`: a row on its way to experts with ids, weights and scales; `result`: a row on its way back."""

    record: int
    result: int


def row_bytes(hidden_size: int, top_k: int, *, result_type: int = 2, fp8_rows: bool) -> RowBytes:
    """Ids are int32, weights and scales fp32, one scale for 128 columns. `result_type`: bytes of the model's type."""
    row = hidden_size + 4 * (hidden_size // 128) if fp8_rows else hidden_size * result_type
    return RowBytes(row + 8 * top_k, hidden_size * result_type)


@dataclass(frozen=True, slots=True)
class Sent:
    """`completion`: what makes the layer's output whole on every rank after `combine`."""

    counts: float = 0
    dispatch: float = 0
    combine: float = 0
    completion: float = 0

    @property
    def total(self) -> float:
        return self.counts + self.dispatch + self.combine + self.completion


def sent(name: str, row: RowBytes, ranks: int, *, rows: int, copies_out: float, copies_back: float) -> Sent:
    """Return what one of `ranks` sends in a step of `rows` rows, a multiple of `ranks`.

    `copies_out`: pairs of one of its rows and another rank that the row goes to; `copies_back`: pairs of a row of
    another rank and this one. A row goes to a rank once, however many of its experts are there.
    """
    others, share = ranks - 1, rows // ranks
    if name == "local":
        return Sent(completion=2 * others * share * row.result)
    gather = others * share * row.result
    if name == "all_gather":
        return Sent(dispatch=others * share * row.record, combine=others * share * row.result, completion=gather)
    if name == "torch":
        return Sent(8 * others, copies_out * row.record, copies_back * row.result, gather)
    assert name == "mori", name
    # A row carries its number at its sender, too.
    return Sent(4 * others, copies_out * (row.record + 4), copies_back * row.result, gather)


def chance_of_a_rank(num_experts: int, top_k: int, ep: int) -> float:
    """Return how likely a row with `top_k` distinct experts, all equally likely, has one on a given expert rank."""
    return 1 - comb(num_experts - num_experts // ep, top_k) / comb(num_experts, top_k)


def expected(name: str, row: RowBytes, ranks: int, *, ep: int, num_experts: int, top_k: int) -> Sent:
    """Return bytes per row of a step and rank for uniform routing, without the counts, which no row adds to."""
    copies = (ranks - 1) * chance_of_a_rank(num_experts, top_k, ep)
    whole = sent(name, row, ranks, rows=ranks, copies_out=copies, copies_back=copies)
    return Sent(0, whole.dispatch / ranks, whole.combine / ranks, whole.completion / ranks)


def table(hidden_size: int, num_experts: int, top_k: int, degrees: Sequence[int]) -> str:
    """Return lines for people: kB that one rank sends for each row of a step in each layer, BF16 model."""
    lines = [
        f"kB sent by a rank for each row of a step and MoE layer: hidden {hidden_size}, top-{top_k} of {num_experts}"
        f" experts, BF16 results",
        f"{'':24}{'dispatch':>10}{'combine':>10}{'complete':>10}{'total':>10}",
    ]
    for ep in degrees:
        ranks_of_a_row = ep * chance_of_a_rank(num_experts, top_k, ep)
        lines.append(f"EP{ep}: a row has experts on {ranks_of_a_row:.2f} of {ep} ranks")
        for name in EXCHANGES:
            for fp8_rows in (True, False) if name != "local" else (False,):
                row = row_bytes(hidden_size, top_k, fp8_rows=fp8_rows)
                one = expected(name, row, ep, ep=ep, num_experts=num_experts, top_k=top_k)
                label = name if name == "local" else f"{name}, {'FP8' if fp8_rows else 'BF16'} rows"
                parts = (one.dispatch, one.combine, one.completion, one.total)
                lines.append(f"  {label:22}" + "".join(f"{part / 1000:10.2f}" for part in parts))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(table(8192, 512, 10, (8, 16)) + "\n")
