"""Inputs of causal_conv that matter."""

from __future__ import annotations

from functools import partial

import torch

from rocm_serve.ops.contract import Arguments, Case
from rocm_serve.ops.inputs import normal, sequences_of


def _case(
    g: torch.Generator,
    dtype: torch.dtype,
    *,
    rows: tuple[int, ...],
    channels: int = 96,
    taps: int = 4,
    fresh: bool = False,
    row_states: bool = False,
    first_row: int = 0,
) -> Arguments:
    sequences, _ = sequences_of(g, rows, (0,) * len(rows), first_row=first_row)
    total = sequences.row_starts[-1] + 3
    state = normal(g, len(rows) + 2, taps - 1, channels, dtype=dtype)
    return {
        "u_TC": normal(g, total, channels, dtype=dtype),
        "weight_CK": normal(g, channels, taps, dtype=dtype),
        "state": torch.zeros_like(state) if fresh else state,
        "sequences": sequences,
        "row_states": torch.zeros(total, taps - 1, channels, dtype=dtype) if row_states else None,
    }


CASES: dict[str, Case] = {
    "no sequences": partial(_case, rows=()),
    "one row": partial(_case, rows=(1,)),
    "fewer rows than taps": partial(_case, rows=(2, 1, 3)),
    "prompts": partial(_case, rows=(37, 64, 5), fresh=True),
    "mixed": partial(_case, rows=(1, 1, 4, 30)),
    "odd sizes": partial(_case, rows=(7,), channels=37, taps=3),
    "not the first rows": partial(_case, rows=(5, 2), first_row=11),
    "states of rows": partial(_case, rows=(1, 4, 2), row_states=True),
}
