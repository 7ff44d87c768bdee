"""Inputs of moe_experts that matter."""

from __future__ import annotations

from functools import partial

import torch

from rocm_serve.ops.contract import Arguments, Case
from rocm_serve.ops.inputs import block_fp8, normal


def _case(
    g: torch.Generator,
    dtype: torch.dtype,
    *,
    t: int,
    h: int = 128,
    i: int = 128,
    e: int = 8,
    k: int = 3,
    live: int | None = None,
    fp8: bool = False,
    activation: str = "bf16",
    elsewhere: bool = False,
    one_expert: bool = False,
) -> Arguments:
    ids = torch.stack([torch.randperm(e, generator=g)[:k] for _ in range(t)]) if t else torch.empty(0, k)
    if elsewhere:
        ids[torch.rand(ids.shape, generator=g) < 0.4] = -1
    if one_expert:
        ids[:, 0] = e - 1
    arguments: Arguments = {
        "x_TH": normal(g, t, h, dtype=dtype),
        "ids_Tk": ids.to(torch.int32),
        "weights_Tk": torch.rand(t, k, generator=g),
        "num_rows": t if live is None else live,
        "activation": activation,
    }
    if not fp8:
        w13, w2 = normal(g, e, 2 * i, h, scale=h**-0.5, dtype=dtype), normal(g, e, h, i, scale=i**-0.5, dtype=dtype)
        return arguments | {"w13_EIH": w13, "w2_EHI": w2}
    (w13, s13), (w2, s2) = block_fp8(g, e, 2 * i, h, scale=h**-0.5), block_fp8(g, e, h, i, scale=i**-0.5)
    return arguments | {"w13_EIH": w13, "w13_scale": s13, "w2_EHI": w2, "w2_scale": s2}


CASES: dict[str, Case] = {
    "no rows": partial(_case, t=0),
    "no live rows": partial(_case, t=5, live=0),
    "one row": partial(_case, t=1),
    "odd sizes": partial(_case, t=37, h=72, i=40, e=5, k=2),
    "padding rows": partial(_case, t=9, live=6),
    "experts elsewhere": partial(_case, t=21, elsewhere=True),
    "all to one expert": partial(_case, t=70, k=1, one_expert=True),
    "fp8 weights": partial(_case, t=21, h=256, i=384, fp8=True),
    "fp8 weights and rows": partial(_case, t=21, h=256, i=384, fp8=True, activation="fp8_1x128"),
    "fp8 rows, plain weights": partial(_case, t=4, activation="fp8_1x128"),
}
