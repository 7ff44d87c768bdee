"""Inputs of linear that matter."""

from __future__ import annotations

from functools import partial

import torch

from rocm_serve.ops.contract import Arguments, Case
from rocm_serve.ops.inputs import normal


def linear_case(
    g: torch.Generator, dtype: torch.dtype, *, t: int, k: int, n: int, out_dtype: torch.dtype | None = None
) -> Arguments:
    """Rows and a weight."""
    return {
        "x_TK": normal(g, t, k, dtype=dtype),
        "weight_NK": normal(g, n, k, scale=k**-0.5, dtype=dtype),
        "out_dtype": out_dtype,
    }


CASES: dict[str, Case] = {
    "no rows": partial(linear_case, t=0, k=256, n=64),
    "one row": partial(linear_case, t=1, k=256, n=512),
    "odd sizes": partial(linear_case, t=37, k=101, n=67),
    "one column": partial(linear_case, t=33, k=256, n=1),
    "float32 out": partial(linear_case, t=5, k=256, n=64, out_dtype=torch.float32),
    "float32 out, odd": partial(linear_case, t=3, k=2056, n=1031, out_dtype=torch.float32),
    "2.4T router": partial(linear_case, t=3, k=8192, n=512),
}
