"""Inputs of quantise_rows that matter."""

from __future__ import annotations

from functools import partial

import torch

from rocm_serve.ops.contract import Arguments, Case
from rocm_serve.ops.fp8 import FN
from rocm_serve.ops.inputs import normal


def quantise_case(
    g: torch.Generator, dtype: torch.dtype, *, t: int, k: int, to: torch.dtype = FN, scale: float = 1.0
) -> Arguments:
    """Rows, and the FP8 dialect that they become."""
    return {"x_TK": normal(g, t, k, scale=scale, dtype=dtype), "dtype": to}


def _zeros(g: torch.Generator, dtype: torch.dtype) -> Arguments:
    arguments = quantise_case(g, dtype, t=3, k=256)
    x = arguments["x_TK"]
    assert isinstance(x, torch.Tensor)
    x[1] = 0
    x[2, 128:] = 0
    return arguments


CASES: dict[str, Case] = {
    "no rows": partial(quantise_case, t=0, k=256),
    "one row": partial(quantise_case, t=1, k=256),
    "odd rows": partial(quantise_case, t=37, k=640),
    "a ragged block": partial(quantise_case, t=5, k=200),
    "small values": partial(quantise_case, t=5, k=256, scale=1e-4),
    "blocks of zeros": _zeros,
}
