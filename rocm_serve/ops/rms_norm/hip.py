"""RMS norm by kernels_hip: plain, with the residual add, and quantised. Letters: T rows, H width, B blocks of 128."""

from __future__ import annotations

import torch

from rocm_serve.ops.contract import OpFunction
from rocm_serve.ops.fp8 import BLOCK
from rocm_serve.ops.hip_library import Library, aligned, check


def make_rms_norm(library: Library) -> OpFunction:
    """Return the op's function."""
    launch = library.entry("rs_rms_norm")

    def rms_norm(x_TH: torch.Tensor, weight_H: torch.Tensor, *, eps: float, plus_one: bool) -> torch.Tensor:
        """Shapes: x [..., H] bfloat16, weight [H] of the same dtype -> [..., H]. Errors: ValueError for another H."""
        width = check("rms_norm", x_TH)
        x, weight = aligned(x_TH), _weight(weight_H, width)
        y = _fresh(x)
        launch(x, weight, y, *_as_rows(x, width), width, eps, plus_one)
        return y

    return rms_norm


def make_add_rms_norm(library: Library) -> OpFunction:
    """Return the op's function."""
    launch = library.entry("rs_add_rms_norm")

    def add_rms_norm(
        x_TH: torch.Tensor, residual_TH: torch.Tensor, weight_H: torch.Tensor, *, eps: float, plus_one: bool
    ) -> torch.Tensor:
        """Shapes: x, residual [T, H] bfloat16, weight [H] -> [T, H]; `residual` then holds x + residual."""
        width = check("add_rms_norm", x_TH)
        x, residual, weight = aligned(x_TH), aligned(residual_TH), _weight(weight_H, width)
        y = _fresh(x)
        launch(x, residual, weight, y, x.shape[0], x.stride(0), residual.stride(0), width, eps, plus_one)
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
    width = check("rms_norm_fp8", x_TH)
    x, weight = aligned(x_TH), _weight(weight_H, width)
    rows = x.shape[0]
    values = torch.empty(rows, width, dtype=dtype, device=x.device)
    scales = torch.empty(rows, -(-width // BLOCK), dtype=torch.float32, device=x.device)
    y = _fresh(x) if with_norm else None
    library.entry("rs_rms_norm_fp8")(x, weight, values, scales, y, rows, x.stride(0), width, eps, plus_one)
    return values, scales, y


def _fresh(x: torch.Tensor) -> torch.Tensor:
    """Return an unwritten contiguous tensor of the shape of `x`."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _as_rows(x: torch.Tensor, width: int) -> tuple[int, int, int, int]:
    """Return rows, inner rows, and the strides over outer and inner rows, of any number of leading dimensions."""
    if x.is_contiguous():
        return x.numel() // width, 1, width, 0
    if x.dim() == 2:
        return x.shape[0], 1, x.stride(0), 0
    if x.dim() == 3:
        return x.shape[0] * x.shape[1], x.shape[1], x.stride(0), x.stride(1)
    raise ValueError(f"rms_norm by hip takes a strided x of 2 or 3 dimensions, not {x.dim()}")


def _weight(weight_H: torch.Tensor, width: int) -> torch.Tensor:
    if weight_H.dtype != torch.bfloat16 or weight_H.shape != (width,):
        raise ValueError(f"a weight of torch.bfloat16 ({width},) is wanted, not {weight_H.dtype} {weight_H.shape}")
    return aligned(weight_H)
