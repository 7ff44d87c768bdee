"""Inputs of gdn_extend that matter."""

from __future__ import annotations

from functools import partial
from itertools import accumulate

import torch

from rocm_serve.ops.contract import Arguments, Case
from rocm_serve.ops.gdn_cases import committing
from rocm_serve.ops.inputs import normal, sequences_of


def extend_case(
    g: torch.Generator,
    dtype: torch.dtype,
    *,
    rows: tuple[int, ...],
    accepted: tuple[int, ...],
    drafts: tuple[int, ...],
    channels: int = 136,
    value: int = 72,
    gates: int = 6,
    most: int = 4,
    beyond: int = 0,
    first_row: int = 0,
) -> Arguments:
    """Sequences of rows, the last ones drafts, and as many accepted ones pending. `beyond`: rows of padding.

    Rows are slices of a wider projection.
    """
    sequences, _ = sequences_of(g, rows, (0,) * len(rows), first_row=first_row)
    counts = [m + n for m, n in zip(accepted, rows, strict=True)]
    starts = tuple(accumulate(counts, initial=0))
    extended, _ = sequences_of(g, tuple(counts), (0,) * len(rows))
    extended = committing(extended, tuple(count - d for count, d in zip(counts, drafts, strict=True)))
    total = sequences.row_starts[-1] + 2
    wide = normal(g, total, channels + value + gates, dtype=dtype)
    slots = len(rows) + 2
    return {
        "u_TC": wide[:, :channels],
        "ba_TG": wide[:, channels + value :],
        "z_TV": wide[:, channels : channels + value],
        "pending_u": normal(g, slots, most, channels, dtype=dtype),
        "pending_ba": normal(g, slots, most, gates, dtype=dtype),
        "sequences": sequences,
        "extended": extended,
        "rows": starts[-1] + beyond,
    }


CASES: dict[str, Case] = {
    "no sequences": partial(extend_case, rows=(), accepted=(), drafts=()),
    "no sequences, padding": partial(extend_case, rows=(), accepted=(), drafts=(), beyond=3),
    "one row": partial(extend_case, rows=(1,), accepted=(0,), drafts=(0,)),
    "one of four": partial(extend_case, rows=(5,), accepted=(4,), drafts=(4,)),
    "all kinds": partial(extend_case, rows=(1, 3, 2, 4), accepted=(3, 0, 2, 1), drafts=(0, 2, 1, 3), beyond=5),
    "after rows of others": partial(extend_case, rows=(2, 4), accepted=(1, 0), drafts=(1, 3), first_row=3),
    "one draft at most": partial(extend_case, rows=(2, 1), accepted=(1, 1), drafts=(1, 0), most=1),
    "sequences without rows": partial(extend_case, rows=(3, 0, 0), accepted=(2, 0, 0), drafts=(2, 0, 0), beyond=9),
    "35B": partial(
        extend_case, rows=(4, 4), accepted=(3, 1), drafts=(3, 3), channels=8192, value=4096, gates=64, most=3
    ),
}
