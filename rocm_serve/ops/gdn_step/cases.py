"""Inputs of gdn_step that matter."""

from __future__ import annotations

from functools import partial

import torch

from rocm_serve.ops.contract import Arguments, Case
from rocm_serve.ops.gdn_cases import committing
from rocm_serve.ops.inputs import normal, sequences_of

TAPS = 4


def step_case(
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
    scale: float = 1.0,
    eps: float = 1e-6,
    activation: str = "silu",
    commits: tuple[int, ...] | None = None,
) -> Arguments:
    """Sequences of rows with the states that they continue. `scale` of the rows: near zero, epsilons show."""
    sequences, _ = sequences_of(g, rows, (0,) * len(rows), first_row=first_row)
    if commits is not None:
        sequences = committing(sequences, commits)
    total, channels = sequences.row_starts[-1] + 3, 2 * key_heads * key + heads * value
    window, state = (
        normal(g, len(rows) + 2, TAPS - 1, channels, dtype=dtype),
        normal(g, len(rows) + 2, heads, value, key),
    )
    return {
        "u_TC": normal(g, total, channels, scale=scale, dtype=dtype),
        "conv_weight_CK": normal(g, channels, TAPS, dtype=dtype),
        "conv_state": torch.zeros_like(window) if fresh else window,
        "a_TH": normal(g, total, heads, dtype=dtype),
        "b_TH": normal(g, total, heads, dtype=dtype),
        "a_log_H": normal(g, heads),
        "dt_bias_H": normal(g, heads),
        "state": torch.zeros_like(state) if fresh else state,
        "z_THV": normal(g, total, heads, value, scale=2.0, dtype=dtype),
        "norm_weight_V": normal(g, value) * 0.3 + 1.0,
        "sequences": sequences,
        "eps": eps,
        "activation": activation,
    }


CASES: dict[str, Case] = {
    "no sequences": partial(step_case, rows=()),
    "one row": partial(step_case, rows=(1,)),
    "a fresh state": partial(step_case, rows=(1, 1), fresh=True),
    "many sequences": partial(step_case, rows=(1,) * 7),
    "drafts to verify": partial(step_case, rows=(4, 1, 3)),
    "drafts on a copy": partial(step_case, rows=(4, 1, 3, 2), commits=(1, 1, 2, 2)),
    "all rows on a copy": partial(step_case, rows=(2, 0, 3), commits=(0, 0, 1)),
    "sigmoid": partial(step_case, rows=(1, 1), activation="sigmoid"),
    "eps matters": partial(step_case, rows=(1, 1), fresh=True, scale=1e-2, eps=1e-5),
    "one head": partial(step_case, rows=(2,), heads=1, key_heads=1),
    "not the first rows": partial(step_case, rows=(1, 2), first_row=11),
    "35B heads": partial(step_case, rows=(1,), heads=32, key_heads=16, key=128, value=128),
    "2.4T heads at tp 8": partial(step_case, rows=(1, 1), heads=16, key_heads=2, key=128, value=128),
}
