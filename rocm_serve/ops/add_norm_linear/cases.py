"""Inputs of add_norm_linear that matter."""

from __future__ import annotations

from functools import partial

import torch

from rocm_serve.ops.contract import Arguments, Case
from rocm_serve.ops.inputs import normal


def add_norm_linear_case(
    g: torch.Generator,
    dtype: torch.dtype,
    *,
    t: int,
    h: int,
    n: int,
    scale: float = 1.0,
    eps: float = 1e-6,
    plus_one: bool = True,
) -> Arguments:
    """Rows to add to a stream, the weights of norm and product, and where the sum goes."""
    return {
        "x_TH": normal(g, t, h, scale=scale, dtype=dtype),
        "residual_TH": normal(g, t, h, scale=scale, dtype=dtype),
        "norm_weight_H": normal(g, h, scale=0.3, dtype=dtype),
        "weight_NH": normal(g, n, h, scale=h**-0.5, dtype=dtype),
        "total_TH": normal(g, t, h, dtype=dtype),
        "eps": eps,
        "plus_one": plus_one,
    }


CASES: dict[str, Case] = {
    "no rows": partial(add_norm_linear_case, t=0, h=256, n=64),
    "one row": partial(add_norm_linear_case, t=1, h=256, n=100),
    "odd sizes": partial(add_norm_linear_case, t=3, h=259, n=67),
    "plain weight": partial(add_norm_linear_case, t=2, h=128, n=16, plus_one=False),
    "eps matters": partial(add_norm_linear_case, t=4, h=256, n=40, scale=1e-3, eps=1e-5),
    "2.4T router": partial(add_norm_linear_case, t=4, h=8192, n=64),
}
