"""RMS norm and its form with the residual add by AITER's HIP kernels. Letters: T rows, H width.

They reinterpret a weight of another dtype than the rows and launch an empty grid for no rows: both are kept from them.
"""

from __future__ import annotations

import torch
from aiter.ops.rmsnorm import add_rmsnorm, rmsnorm


def rms_norm(x_TH: torch.Tensor, weight_H: torch.Tensor, *, eps: float, plus_one: bool) -> torch.Tensor:
    """Normalise each row; see the reference. `plus_one` is added to the weight in fp32, inside the kernel."""
    assert weight_H.dtype == x_TH.dtype, f"rows are {x_TH.dtype}, the weight is {weight_H.dtype}"
    out_TH = torch.empty(x_TH.shape, dtype=x_TH.dtype, device=x_TH.device)
    if x_TH.numel():
        width = x_TH.shape[-1]
        rmsnorm(
            out=out_TH.view(-1, width),
            input=x_TH.reshape(-1, width).contiguous(),
            weight=weight_H,
            epsilon=eps,
            gemma_norm=plus_one,
        )
    return out_TH


def add_rms_norm(
    x_TH: torch.Tensor, residual_TH: torch.Tensor, weight_H: torch.Tensor, *, eps: float, plus_one: bool
) -> torch.Tensor:
    """Add `x` to the residual stream in place and return the norm of the sum; see the reference."""
    assert weight_H.dtype == x_TH.dtype == residual_TH.dtype, (
        f"rows are {x_TH.dtype}, the stream is {residual_TH.dtype}, the weight is {weight_H.dtype}"
    )
    out_TH = torch.empty(x_TH.shape, dtype=x_TH.dtype, device=x_TH.device)
    if x_TH.numel():
        sum_TH = torch.empty_like(out_TH)  # AITER does not say that the sum may go where the residual is
        add_rmsnorm(
            out=out_TH,
            input=x_TH.contiguous(),
            residual_in=residual_TH.contiguous(),
            residual_out=sum_TH,
            weight=weight_H,
            epsilon=eps,
            gemma_norm=plus_one,
        )
        residual_TH.copy_(sum_TH)
    return out_TH
