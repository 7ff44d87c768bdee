"""Inputs of causal_conv that matter."""

from __future__ import annotations

from functools import partial

import torch

from rocm_serve.ops.contract import Arguments, Case
from rocm_serve.ops.gdn_cases import committing
from rocm_serve.ops.inputs import normal, sequences_of


def conv_case(
    g: torch.Generator,
    dtype: torch.dtype,
    *,
    rows: tuple[int, ...],
    channels: int = 96,
    taps: int = 4,
    fresh: bool = False,
    first_row: int = 0,
    commits: tuple[int, ...] | None = None,
) -> Arguments:
    """Sequences of rows with the states that they continue."""
    sequences, _ = sequences_of(g, rows, (0,) * len(rows), first_row=first_row)
    if commits is not None:
        sequences = committing(sequences, commits)
    total = sequences.row_starts[-1] + 3
    state = normal(g, len(rows) + 2, taps - 1, channels, dtype=dtype)
    return {
        "u_TC": normal(g, total, channels, dtype=dtype),
        "weight_CK": normal(g, channels, taps, dtype=dtype),
        "state": torch.zeros_like(state) if fresh else state,
        "sequences": sequences,
    }


CASES: dict[str, Case] = {
    "no sequences": partial(conv_case, rows=()),
    "one row": partial(conv_case, rows=(1,)),
    "fewer rows than taps": partial(conv_case, rows=(2, 1, 3)),
    "prompts": partial(conv_case, rows=(37, 64, 5), fresh=True),
    "mixed": partial(conv_case, rows=(1, 1, 4, 30)),
    "odd sizes": partial(conv_case, rows=(7,), channels=37, taps=3),
    "not the first rows": partial(conv_case, rows=(5, 2), first_row=11),
    "drafts on a copy": partial(conv_case, rows=(1, 4, 2, 9), commits=(1, 1, 2, 6)),
    "all rows on a copy": partial(conv_case, rows=(2, 0, 5), commits=(0, 0, 2)),
}
