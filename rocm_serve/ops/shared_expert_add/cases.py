"""Inputs of shared_expert_add that matter."""

from __future__ import annotations

from functools import partial

import torch

from rocm_serve.ops.contract import Arguments, Case
from rocm_serve.ops.inputs import normal


def shared_case(g: torch.Generator, dtype: torch.dtype, *, t: int, h: int, scale: float = 2.0) -> Arguments:
    """Rows of both kinds of experts, and what opens the gate: numbers of size `scale`."""
    return {
        "routed_TH": normal(g, t, h, dtype=dtype),
        "shared_TH": normal(g, t, h, dtype=dtype),
        "x_TH": normal(g, t, h, dtype=dtype),
        "gate_weight_1H": normal(g, 1, h, scale=scale * h**-0.5, dtype=dtype),
    }


CASES: dict[str, Case] = {
    "no rows": partial(shared_case, t=0, h=64),
    "one row": partial(shared_case, t=1, h=512),
    "odd sizes": partial(shared_case, t=37, h=51),
    "many rows": partial(shared_case, t=133, h=136),
    "gates open or shut": partial(shared_case, t=5, h=264, scale=30.0),
    "35B": partial(shared_case, t=3, h=2048),
}
