"""Inputs of rms_norm and add_rms_norm that matter."""

from __future__ import annotations

from functools import partial

import torch

from rocm_serve.ops.contract import Arguments, Case
from rocm_serve.ops.inputs import normal


def norm_case(
    g: torch.Generator,
    dtype: torch.dtype,
    *,
    shape: tuple[int, ...],
    residual: bool = False,
    scale: float = 1.0,
    eps: float = 1e-6,
    plus_one: bool = True,
    strided: bool = False,
) -> Arguments:
    """Rows to normalise, with a residual when asked for."""
    x = normal(g, *shape[:-1], shape[-1] * (2 if strided else 1), scale=scale, dtype=dtype)[..., : shape[-1]]
    more: Arguments = {"residual_TH": normal(g, *shape, scale=scale, dtype=dtype)} if residual else {}
    return {
        "x_TH": x,
        **more,
        "weight_H": normal(g, shape[-1], scale=0.3, dtype=dtype),
        "eps": eps,
        "plus_one": plus_one,
    }


def _cases(residual: bool) -> dict[str, Case]:
    case = partial(norm_case, residual=residual)
    return {
        "no rows": partial(case, shape=(0, 256)),
        "one row": partial(case, shape=(1, 256)),
        "odd sizes": partial(case, shape=(37, 259)),
        "strided": partial(case, shape=(5, 128), strided=True),
        "plain weight": partial(case, shape=(9, 256), plus_one=False),
        "eps matters": partial(case, shape=(9, 256), scale=1e-3, eps=1e-5),
        "large values": partial(case, shape=(9, 256), scale=1e4),
        "2.4T width": partial(case, shape=(3, 8192)),
    }


CASES: dict[str, Case] = {**_cases(False), "heads": partial(norm_case, shape=(7, 3, 64))}
ADD_CASES = _cases(True)
