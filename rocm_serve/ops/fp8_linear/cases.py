"""Inputs of fp8_linear that matter."""

from __future__ import annotations

from functools import partial

import torch

from rocm_serve.ops.contract import Arguments, Case
from rocm_serve.ops.inputs import block_fp8, normal


def fp8_linear_case(
    g: torch.Generator, dtype: torch.dtype, *, t: int, k: int, n: int, activation: str = "bf16", scale: float = 1.0
) -> Arguments:
    """Rows and a block-FP8 weight."""
    weight, scales = block_fp8(g, n, k, scale=k**-0.5)
    x = normal(g, t, k, scale=scale, dtype=dtype)
    return {"x_TK": x, "weight_NK": weight, "scale": scales, "activation": activation}


def _zeros(g: torch.Generator, dtype: torch.dtype, *, activation: str) -> Arguments:
    arguments = fp8_linear_case(g, dtype, t=3, k=256, n=128, activation=activation)
    x = arguments["x_TK"]
    assert isinstance(x, torch.Tensor)
    x[1] = 0
    x[2, 128:] = 0
    return arguments


CASES: dict[str, Case] = {
    f"{name}, {activation}": partial(case, activation=activation)
    for activation in ("bf16", "fp8_1x128")
    for name, case in {
        "no rows": partial(fp8_linear_case, t=0, k=256, n=128),
        "one row": partial(fp8_linear_case, t=1, k=256, n=384),
        "odd rows": partial(fp8_linear_case, t=37, k=512, n=256),
        "ragged blocks": partial(fp8_linear_case, t=5, k=200, n=130),
        "small values": partial(fp8_linear_case, t=5, k=256, n=128, scale=1e-4),
        "blocks of zeros": _zeros,
    }.items()
}
