"""Inputs of gated_rms_norm that matter."""

from __future__ import annotations

from functools import partial

import torch

from rocm_serve.ops.contract import Arguments, Case
from rocm_serve.ops.inputs import normal


def gated_norm_case(
    g: torch.Generator,
    dtype: torch.dtype,
    *,
    shape: tuple[int, int, int],
    scale: float = 1.0,
    eps: float = 1e-6,
    activation: str = "silu",
) -> Arguments:
    """Rows of heads with their gates."""
    return {
        "x_THD": normal(g, *shape, scale=scale, dtype=dtype),
        "gate_THD": normal(g, *shape, scale=2.0, dtype=dtype),
        "weight_D": normal(g, shape[-1], dtype=torch.float32) * 0.3 + 1.0,
        "eps": eps,
        "activation": activation,
    }


CASES: dict[str, Case] = {
    "no rows": partial(gated_norm_case, shape=(0, 4, 128)),
    "one row": partial(gated_norm_case, shape=(1, 16, 128)),
    "odd sizes": partial(gated_norm_case, shape=(13, 3, 40)),
    "sigmoid": partial(gated_norm_case, shape=(5, 4, 128), activation="sigmoid"),
    "eps matters": partial(gated_norm_case, shape=(5, 4, 128), scale=1e-3, eps=1e-5),
}
