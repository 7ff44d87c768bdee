"""The sum over ranks and the norm that follows it. Letters: T rows, H width."""

from __future__ import annotations

import torch

from rocm_serve.ops.rms_norm.reference import add_rms_norm
from rocm_serve.parallel.comm import Comm


def all_reduce_add_rms_norm(
    comm: Comm, x_TH: torch.Tensor, residual_TH: torch.Tensor, weight_H: torch.Tensor, *, eps: float, plus_one: bool
) -> torch.Tensor:
    """Sum `x` over ranks, add it to the residual stream in place and return the norm of that, the same on every rank.

    Shapes: x, residual [T, H], weight [H] -> [T, H]. The memory of `x` may be used for the sum.
    Numerics: each sum is rounded to the stream's dtype.
    """
    return add_rms_norm(comm.all_reduce(x_TH), residual_TH, weight_H, eps=eps, plus_one=plus_one)
