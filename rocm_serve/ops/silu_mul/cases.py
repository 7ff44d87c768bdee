"""Inputs of silu_mul that matter."""

from __future__ import annotations

from functools import partial

import torch

from rocm_serve.ops.contract import Arguments, Case
from rocm_serve.ops.inputs import normal


def silu_mul_case(g: torch.Generator, dtype: torch.dtype, *, t: int, i: int, scale: float = 2.0) -> Arguments:
    """Gates and what they scale, side by side."""
    return {"gate_up_TI": normal(g, t, 2 * i, scale=scale, dtype=dtype)}


CASES: dict[str, Case] = {
    "no rows": partial(silu_mul_case, t=0, i=64),
    "one row": partial(silu_mul_case, t=1, i=512),
    "odd sizes": partial(silu_mul_case, t=37, i=51),
    "large values": partial(silu_mul_case, t=4, i=64, scale=100.0),
    "many elements": partial(silu_mul_case, t=130, i=512),
}
