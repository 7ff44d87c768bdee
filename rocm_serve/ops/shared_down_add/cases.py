"""Inputs of shared_down_add that matter."""

from __future__ import annotations

from functools import partial

import torch

from rocm_serve.ops.contract import Arguments, Case
from rocm_serve.ops.inputs import normal


def down_case(g: torch.Generator, dtype: torch.dtype, *, t: int, i: int, h: int, scale: float = 2.0) -> Arguments:
    """Rows of routed experts, and of a shared one: gate and up, its own gate of size `scale`, the weight of down."""
    return {
        "routed_TH": normal(g, t, h, dtype=dtype),
        "gate_up_TI": normal(g, t, 2 * i, scale=2.0, dtype=dtype),
        "gate_T1": normal(g, t, 1, scale=scale, dtype=dtype),
        "weight_HI": normal(g, h, i, scale=i**-0.5, dtype=dtype),
    }


CASES: dict[str, Case] = {
    "no rows": partial(down_case, t=0, i=64, h=64),
    "one row": partial(down_case, t=1, i=64, h=200),
    "odd sizes": partial(down_case, t=3, i=51, h=67),
    "gates open or shut": partial(down_case, t=4, i=72, h=40, scale=30.0),
    "more rows": partial(down_case, t=37, i=72, h=40),
    "35B": partial(down_case, t=4, i=512, h=256),
}
