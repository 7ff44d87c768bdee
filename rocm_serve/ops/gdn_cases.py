"""Inputs of both forms of the gated delta rule."""

from __future__ import annotations

from dataclasses import replace

import torch

from rocm_serve.ops.batch import Sequences
from rocm_serve.ops.contract import Arguments
from rocm_serve.ops.inputs import normal, sequences_of


def committing(sequences: Sequences, commits: tuple[int, ...]) -> Sequences:
    """Return the sequences with so many rows of each before the states are kept."""
    return replace(sequences, commits=commits, commits_B=torch.tensor(commits, dtype=torch.int32))


def gdn_case(
    g: torch.Generator,
    dtype: torch.dtype,
    *,
    rows: tuple[int, ...],
    heads: int = 8,
    key_heads: int = 2,
    key: int = 32,
    value: int = 48,
    fresh: bool = False,
    first_row: int = 0,
    decay: float = 0.0,
    commits: tuple[int, ...] | None = None,
) -> Arguments:
    """Build one case. `decay` shifts A_log: states that last, or are forgotten at once."""
    sequences, _ = sequences_of(g, rows, (0,) * len(rows), first_row=first_row)
    if commits is not None:
        sequences = committing(sequences, commits)
    total = sequences.row_starts[-1] + 3
    state = normal(g, len(rows) + 2, heads, value, key)
    return {
        "q_ThK": normal(g, total, key_heads, key, dtype=dtype),
        "k_ThK": normal(g, total, key_heads, key, dtype=dtype),
        "v_THV": normal(g, total, heads, value, dtype=dtype),
        "a_TH": normal(g, total, heads, dtype=dtype),
        "b_TH": normal(g, total, heads, dtype=dtype),
        "a_log_H": normal(g, heads) + decay,
        "dt_bias_H": normal(g, heads),
        "state": torch.zeros_like(state) if fresh else state,
        "sequences": sequences,
        "out_THV": torch.zeros(total, heads, value, dtype=dtype),
    }
