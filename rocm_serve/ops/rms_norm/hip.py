"""RMS norm by kernels_hip: plain, with the residual add, and quantised. Letters: T rows, H width, B blocks of 128."""

from __future__ import annotations

import torch

from rocm_serve.ops.contract import OpFunction
from rocm_serve.ops.fp8 import BLOCK
from rocm_serve.ops.hip_library import Library, aligned, check


def make_rms_norm(library: Library) -> OpFunction:
    """Return the op's function."""

    def rms_norm(x_TH: torch.Tensor, weight_H: torch.Tensor, *, eps: float, plus_one: bool) -> torch.Tensor:
        """Shapes: x [..., H] bfloat16, weight [H] of the same dtype -> [..., H]. Errors: ValueError for another H."""
        check("rms_norm", x_TH)
        x = aligned(x_TH)
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        rows, inner, outer_stride, inner_stride = _as_rows(x)
        strides = (rows, inner, outer_stride, inner_stride, x.shape[-1])
        library.call("rs_rms_norm", x, _weight(weight_H, x), y, *strides, eps, plus_one)
        return y

    return rms_norm


def make_add_rms_norm(library: Library) -> OpFunction:
    """Return the op's function."""

    def add_rms_norm(
        x_TH: torch.Tensor, residual_TH: torch.Tensor, weight_H: torch.Tensor, *, eps: float, plus_one: bool
    ) -> torch.Tensor:
        """Shapes: x, residual [T, H] bfloat16, weight [H] -> [T, H]; `residual` then holds x + residual."""
        check("add_rms_norm", x_TH)
        x, residual = aligned(x_TH), aligned(residual_TH)
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        sizes = (x.shape[0], x.stride(0), residual.stride(0), x.shape[1])
        library.call("rs_add_rms_norm", x, residual, _weight(weight_H, x), y, *sizes, eps, plus_one)
        if residual is not residual_TH:
            residual_TH.copy_(residual)
        return y

    return add_rms_norm


def rms_norm_fp8(
    library: Library,
    x_TH: torch.Tensor,
    weight_H: torch.Tensor,
    *,
    eps: float,
    plus_one: bool,
    dtype: torch.dtype,
    with_norm: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Normalise rows and quantise the rounded norm per 128 columns, in one pass.

    Shapes: x [T, H] bfloat16 -> FP8 values [T, H], fp32 multipliers [T, B], and the norm [T, H] itself if `with_norm`.
    `dtype` is the dialect of the GPU: the library holds only that one.
    Source: quantise_rows(rms_norm(x)), bit for bit.
    """
    check("rms_norm_fp8", x_TH)
    x = aligned(x_TH)
    rows, width = x.shape
    values = torch.empty(rows, width, dtype=dtype, device=x.device)
    scales = torch.empty(rows, -(-width // BLOCK), dtype=torch.float32, device=x.device)
    y = torch.empty(rows, width, dtype=x.dtype, device=x.device) if with_norm else None
    sizes = (rows, x.stride(0), width)
    library.call("rs_rms_norm_fp8", x, _weight(weight_H, x), values, scales, y, *sizes, eps, plus_one)
    return values, scales, y


def _as_rows(x: torch.Tensor) -> tuple[int, int, int, int]:
    """Return rows, inner rows, and the strides over outer and inner rows, of any number of leading dimensions."""
    width = x.shape[-1]
    if x.is_contiguous():
        return x.numel() // width, 1, width, 0
    if x.dim() == 2:
        return x.shape[0], 1, x.stride(0), 0
    if x.dim() == 3:
        return x.shape[0] * x.shape[1], x.shape[1], x.stride(0), x.stride(1)
    raise ValueError(f"rms_norm by hip takes a strided x of 2 or 3 dimensions, not {x.dim()}")


def _weight(weight_H: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    if weight_H.dtype != x.dtype or weight_H.shape != x.shape[-1:]:
        raise ValueError(
            f"a weight of {x.dtype} {tuple(x.shape[-1:])} is wanted, not {weight_H.dtype} {weight_H.shape}"
        )
    return aligned(weight_H)
