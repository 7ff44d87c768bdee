"""Inputs of moe_route that matter."""

from __future__ import annotations

from functools import partial

import torch

from rocm_serve.ops.contract import Arguments, Case
from rocm_serve.ops.inputs import normal


def route_case(
    g: torch.Generator, dtype: torch.dtype, *, t: int, e: int, top_k: int, renormalise: bool = True
) -> Arguments:
    """Router logits."""
    return {"logits_TE": normal(g, t, e, scale=2.0, dtype=dtype), "top_k": top_k, "renormalise": renormalise}


def _ties(g: torch.Generator, dtype: torch.dtype) -> Arguments:
    logits = torch.randint(0, 3, (40, 32), generator=g).to(dtype)
    return {"logits_TE": logits, "top_k": 10, "renormalise": True}


CASES: dict[str, Case] = {
    "no rows": partial(route_case, t=0, e=8, top_k=3),
    "one row": partial(route_case, t=1, e=8, top_k=3),
    "odd sizes": partial(route_case, t=37, e=27, top_k=5),
    "not renormalised": partial(route_case, t=9, e=16, top_k=4, renormalise=False),
    "all experts": partial(route_case, t=9, e=8, top_k=8),
    "one expert": partial(route_case, t=9, e=8, top_k=1),
    "ties": _ties,
    "2.4T": partial(route_case, t=33, e=512, top_k=10),
}
