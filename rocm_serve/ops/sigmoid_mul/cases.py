"""Inputs of sigmoid_mul that matter."""

from __future__ import annotations

from functools import partial

import torch

from rocm_serve.ops.contract import Arguments, Case
from rocm_serve.ops.inputs import normal


def sigmoid_mul_case(
    g: torch.Generator, dtype: torch.dtype, *, t: int, h: int, gate: int, scale: float = 2.0
) -> Arguments:
    """Rows and their gates."""
    return {"x_TH": normal(g, t, h, dtype=dtype), "gate": normal(g, t, gate, scale=scale, dtype=dtype)}


def sigmoid_mul_heads_case(g: torch.Generator, dtype: torch.dtype, *, t: int, heads: int, d: int) -> Arguments:
    """Rows of heads, and gates that lie each behind a query head."""
    return {
        "x_TH": normal(g, t, heads, d, dtype=dtype),
        "gate": normal(g, t, heads, 2 * d, scale=2.0, dtype=dtype)[..., d:],
    }


CASES: dict[str, Case] = {
    "no rows": partial(sigmoid_mul_case, t=0, h=64, gate=64),
    "one row": partial(sigmoid_mul_case, t=1, h=512, gate=512),
    "odd sizes": partial(sigmoid_mul_case, t=37, h=51, gate=51),
    "a gate a row": partial(sigmoid_mul_case, t=37, h=256, gate=1),
    "gates beside query heads": partial(sigmoid_mul_heads_case, t=5, heads=3, d=40),
    "no heads": partial(sigmoid_mul_heads_case, t=0, heads=3, d=8),
    "large values": partial(sigmoid_mul_case, t=4, h=64, gate=64, scale=100.0),
}
