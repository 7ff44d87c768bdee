"""Trials of sampling's Triton kernels: ties, padding, masks, keys and several parts of a row; real sizes compiled only.

The bits of a draw are integers on both sides, so tokens are judged equal; the cases give drawn winners a margin that is
far above the rounding of noise.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from evals.gfx.registry import Arch, Trial
from rocm_serve.ops.contract import Arguments
from rocm_serve.ops.sampling.cases import draw_case, sum_case

Build = Callable[[torch.Generator, Arch], Arguments]


def _draw(g: torch.Generator, arch: Arch, **options: object) -> Arguments:
    return draw_case(g, torch.float32, **options)  # type: ignore[arg-type]


def _sums(g: torch.Generator, arch: Arch, *, r: int, v: int, logits: str = "normal") -> Arguments:
    return sum_case(g, torch.float32, r=r, v=v, logits=logits)


def _untouched(g: torch.Generator, arch: Arch, *, drawn: bool) -> Arguments:
    """Arguments of the 2.4T model on one of eight ranks, never read: to compile for."""
    made: Arguments = {"logits_RV": torch.empty(8, 31_040), "first_id": 7 * 31_040, "used": 31_000}
    return made | ({"keys_R": torch.empty(8, dtype=torch.int64), "temperature_R": torch.empty(8)} if drawn else {})


_A_NUMBER_A_ROW = {
    f"{kernel}:{check}": "one number for each row, or for each part of one"
    for kernel, checks in (
        ("draw_part_kernel", ("wide_stores",)),
        ("draw_merge_kernel", ("wide_loads", "wide_stores")),
        ("sum_part_kernel", ("wide_stores",)),
        ("sum_merge_kernel", ("wide_loads", "wide_stores")),
    )
    for check in checks
}
_DRAW, _SUM = ("draw_part_kernel", "draw_merge_kernel"), ("sum_part_kernel", "sum_merge_kernel")


def _trial(op: str, case: str, build: Build, kernels: tuple[str, ...], *, compile_only: bool = False) -> Trial:
    return Trial(
        op=op,
        provider="triton",
        case=case,
        arguments=build,
        kernels=kernels,
        limit=1e-6,
        compile_only=compile_only,
        exceptions={k: why for k, why in _A_NUMBER_A_ROW.items() if k.partition(":")[0] in kernels},
    )


_TURNS = (1.0, 0.0, 0.6, 5.0)
TRIALS: tuple[Trial, ...] = (
    _trial("draw_token", "greedy, ties", partial(_draw, r=3, v=352, used=321, logits="tied"), _DRAW),
    _trial(
        "draw_token",
        "drawn and greedy, masked",
        partial(_draw, r=4, v=352, used=321, first_id=240_000, temperatures=_TURNS, masked=0.3),
        _DRAW,
    ),
    _trial("draw_token", "three parts", partial(_draw, r=1, v=4400, used=4388, temperatures=(1.0,)), _DRAW),
    _trial("draw_token", "2.4T, greedy", partial(_untouched, drawn=False), _DRAW, compile_only=True),
    _trial("draw_token", "2.4T, drawn", partial(_untouched, drawn=True), _DRAW, compile_only=True),
    _trial("log_sum_exp", "3 x 352, wide", partial(_sums, r=3, v=352, logits="wide"), _SUM),
    _trial("log_sum_exp", "2 x 4400", partial(_sums, r=2, v=4400, logits="shifted"), _SUM),
    _trial(
        "log_sum_exp",
        "2.4T",
        lambda g, arch: {"logits_RV": torch.empty(8, 31_040)},
        _SUM,
        compile_only=True,
    ),
)
