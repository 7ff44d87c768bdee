"""Random weights, no zeros, made on the device: activations stay near one, experts are FP8 codes of all sizes."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from math import sqrt

import torch

from rocm_serve.checkpoint.initial import draw
from rocm_serve.ops.fp8 import BLOCK, FNUZ, FP8_DTYPES

_AT_ONCE = 1 << 28  # codes whose NaNs are replaced at a time


def random_codes_(weight: torch.Tensor, g: torch.Generator) -> None:
    """Fill an FP8 tensor with random codes, all of them numbers."""
    codes = weight.view(torch.uint8).view(-1)
    codes.random_(0, 256, generator=g)
    for piece in codes.split(_AT_ONCE):
        no_number = piece == 0x80 if weight.dtype is FNUZ else (piece & 0x7F) == 0x7F
        piece.masked_fill_(no_number, 0x38)  # 1 in e4m3fn


@cache
def code_rms(dtype: torch.dtype) -> float:
    """Return the root mean square of all numbers of an FP8 dialect."""
    values = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    return float(values[values.isfinite()].square().mean().sqrt())


def random_scales_(scale: torch.Tensor, columns: int, dtype: torch.dtype, g: torch.Generator) -> None:
    """Fill scales so that a product with rows of size one has size one; no two blocks alike."""
    unit = 1.0 / (code_rms(dtype) * sqrt(columns))
    scale.uniform_(0.75 * unit, 1.25 * unit, generator=g)


def fp8_weight(
    *shape: int, dtype: torch.dtype, device: torch.device, g: torch.Generator | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Make an FP8 weight [..., N, K] and its scales; without a generator they hold anything."""
    weight = torch.empty(shape, dtype=torch.uint8, device=device).view(dtype)
    scale = torch.empty(*shape[:-2], -(-shape[-2] // BLOCK), -(-shape[-1] // BLOCK), device=device)
    if g is not None:
        random_codes_(weight, g)
        random_scales_(scale, shape[-1], dtype, g)
    return weight, scale


def fill(parameters: Iterable[tuple[str, torch.Tensor]], g: torch.Generator) -> None:
    """Fill a model's parameters as `checkpoint.initial` says of each name, where they are."""
    found = dict(parameters)
    for name, tensor in found.items():
        if tensor.dtype in FP8_DTYPES.values():
            random_codes_(tensor, g)
        elif name.endswith("_scale_inv"):
            weight = found[name.removesuffix("_scale_inv")]
            random_scales_(tensor, weight.shape[-1], weight.dtype, g)
        else:
            how = draw(name, tuple(tensor.shape))
            tensor.normal_(how.mean, how.std, generator=g)
