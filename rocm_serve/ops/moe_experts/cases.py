"""Inputs of moe_experts that matter."""

from __future__ import annotations

from functools import partial

import torch

from rocm_serve.ops.contract import Arguments, Case
from rocm_serve.ops.fp8 import FN, quantise_rows
from rocm_serve.ops.inputs import block_fp8, normal


def experts_case(
    g: torch.Generator,
    dtype: torch.dtype,
    *,
    t: int,
    h: int = 128,
    i: int = 128,
    e: int = 8,
    e_all: int | None = None,
    k: int = 3,
    live: int | None = None,
    fp8: bool = False,
    activation: str = "bf16",
    elsewhere: bool = False,
    one_expert: bool = False,
    idle: int = 0,
    quantised: bool = False,
    counted: bool = False,
) -> Arguments:
    """Rows, their choices and the stacked experts.

    `e_all`: experts over all ranks, the first `e` here. `one_expert`: the last one is every row's first choice. `idle`:
    nobody chooses the first so many. `quantised`: rows of FP8, as another rank sent them.
    `counted`: how many live is known on the device only.
    """
    ids = torch.stack([torch.randperm(e_all or e, generator=g)[:k] for _ in range(t)]) if t else torch.empty(0, k)
    ids[ids >= e] = -1
    if elsewhere:
        ids[torch.rand(ids.shape, generator=g) < 0.4] = -1
    if one_expert:
        ids[ids == e - 1] = -1
        ids[:, 0] = e - 1
    ids[(ids >= 0) & (ids < idle)] = -1
    arguments: Arguments = {
        "x_TH": normal(g, t, h, dtype=dtype),
        "x_scale": None,
        "ids_Tk": ids.to(torch.int32),
        "weights_Tk": torch.rand(t, k, generator=g),
        "num_rows": t if live is None else live,
        "activation": activation,
        "out_dtype": None,
    }
    if counted:
        arguments["num_rows"] = torch.tensor([arguments["num_rows"]], dtype=torch.int32)
    if quantised:
        q, s = quantise_rows(normal(g, t, h, dtype=dtype), FN)
        arguments |= {"x_TH": q, "x_scale": s, "out_dtype": dtype}
    if not fp8:
        w13, w2 = normal(g, e, 2 * i, h, scale=h**-0.5, dtype=dtype), normal(g, e, h, i, scale=i**-0.5, dtype=dtype)
        return arguments | {"w13_EIH": w13, "w2_EHI": w2}
    (w13, s13), (w2, s2) = block_fp8(g, e, 2 * i, h, scale=h**-0.5), block_fp8(g, e, h, i, scale=i**-0.5)
    return arguments | {"w13_EIH": w13, "w13_scale": s13, "w2_EHI": w2, "w2_scale": s2}


CASES: dict[str, Case] = {
    "no rows": partial(experts_case, t=0),
    "no live rows": partial(experts_case, t=5, live=0),
    "one row": partial(experts_case, t=1),
    "odd sizes": partial(experts_case, t=37, h=72, i=40, e=5, k=2),
    "padding rows": partial(experts_case, t=9, live=6),
    "experts elsewhere": partial(experts_case, t=21, elsewhere=True),
    "all to one expert": partial(experts_case, t=70, k=1, one_expert=True),
    "fp8 weights": partial(experts_case, t=21, h=256, i=384, fp8=True),
    "fp8 weights and rows": partial(experts_case, t=21, h=256, i=384, fp8=True, activation="fp8_1x128"),
    "rows sent as fp8": partial(
        experts_case, t=21, live=17, h=256, i=128, fp8=True, activation="fp8_1x128", quantised=True, elsewhere=True
    ),
    "no rows sent as fp8": partial(experts_case, t=0, fp8=True, activation="fp8_1x128", quantised=True),
    "fp8 rows, plain weights": partial(experts_case, t=4, activation="fp8_1x128"),
    # More rows than where weights are what takes time: one expert has all of them, some have none, some are elsewhere.
    **{
        name: partial(experts_case, t=277, live=263, h=256, e=6, e_all=9, one_expert=True, idle=2, **formats)
        for name, formats in {
            "many rows": {},
            "many rows, fp8 weights and rows": {"fp8": True, "activation": "fp8_1x128"},
        }.items()
    },
}
