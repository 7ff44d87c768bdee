"""Random weights, no zeros, made on the device: activations stay near one, experts are FP8."""

from __future__ import annotations

from collections.abc import Iterable
from math import sqrt

import torch

from rocm_serve.checkpoint.initial import draw
from rocm_serve.ops.fp8 import BLOCK, FNUZ, FP8_DTYPES

_AT_ONCE = 1 << 26  # codes that are drawn at a time
_DEVIATION = 112.0  # of the values of codes, as of a block of normal weights whose largest is four deviations
_MOST = {FNUZ: 224.0}  # a fnuz code means half of what it means in fn


def random_codes_(weight: torch.Tensor, g: torch.Generator) -> None:
    """Fill an FP8 tensor with the codes of normal numbers, blocks of which reach the end of the scale.

    Codes at random would not do: most of such a sum comes from a few of its products, and matrix instructions that keep
    few bits of a sum would lose more of it than of any model's.
    """
    most = _MOST.get(weight.dtype, 448.0)
    for piece in weight.view(-1).split(_AT_ONCE):
        values = torch.empty(piece.shape, dtype=torch.float32, device=piece.device)
        values.normal_(0.0, _DEVIATION * most / 448.0, generator=g).clamp_(-most, most)
        piece.copy_(values)


def random_scales_(scale: torch.Tensor, columns: int, dtype: torch.dtype, g: torch.Generator) -> None:
    """Fill scales so that a product with rows of size one has size one; no two blocks alike."""
    unit = 448.0 / (_MOST.get(dtype, 448.0) * _DEVIATION * sqrt(columns))
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
