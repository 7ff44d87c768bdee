"""Sampling's Triton kernels on CPU tensors, by Triton's interpreter; as tests/ops/interpreted.py, which see."""

from __future__ import annotations

import json
import sys

import torch

from rocm_serve.ops.inputs import normal
from rocm_serve.ops.sampling.cases import CASES, draw_case
from tests.ops.interpreted import errors, one_thread, wide
from tests.ops.interpreting import patched_once


def draw_token(g: torch.Generator) -> list[float] | str:
    """One part of a row and three; keys of either sign; a NaN among padding."""
    from rocm_serve.ops.sampling.triton import draw_token as provider

    found = []
    for made in (
        draw_case(g, torch.float32, r=5, v=93, used=90, logits="tied"),
        draw_case(g, torch.float32, r=5, v=93, used=90, temperatures=(1.0, 0.0, 0.7), masked=0.3, first_id=240_000),
        draw_case(g, torch.float32, r=3, v=5000, used=4990, temperatures=(1.0, 0.0, 5.0)),
    ):
        logits = made["logits_RV"]
        assert isinstance(logits, torch.Tensor)
        found += errors("draw_token", provider, made | {"logits_RV": wide(logits)})
    nothing = [[True] * 2, [float("-inf")] * 2, [0, 0]]
    unused = provider(normal(g, 2, 70), torch.tensor([3, 4]), torch.ones(2), first_id=0, used=0)
    masked = provider(torch.full((2, 70), float("-inf")), first_id=0, used=70)
    if [x.tolist() for x in unused] != nothing or [x.tolist() for x in masked[1:]] != nothing[1:]:
        return f"where there is nothing to choose: {unused}, {masked}"
    logits = normal(g, 4, 70)
    logits[1, 69], logits[2, 3], logits[3, 3] = float("nan"), float("inf"), float("-inf")
    finite, _, ids = provider(logits, first_id=0, used=60)
    if finite.tolist() != [True, False, False, False] or not ((ids >= 0) & (ids < 60)).all():
        return f"rows {finite.tolist()} are called finite, ids {ids.tolist()}"
    return found


def gumbel(g: torch.Generator) -> list[float]:
    from tests.ops.noise_kernel import worst_noise

    return [worst_noise(g)]


def log_sum_exp(g: torch.Generator) -> list[float]:
    from rocm_serve.ops.sampling.triton import log_sum_exp as provider

    return [
        error
        for r, v in ((5, 93), (2, 5000))
        for case in CASES.values()
        for error in errors("log_sum_exp", provider, {"logits_RV": wide(case(g, r, v))})
    ]


# Float32 sums in another order; of noise, 3 units in the last place.
LIMITS = {"draw_token": 2e-6, "gumbel": 4e-7, "log_sum_exp": 2e-6}


def main() -> None:
    seed = int(sys.argv[1])
    with one_thread(), patched_once():
        found = {name: globals()[name](torch.Generator().manual_seed(seed)) for name in LIMITS}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
