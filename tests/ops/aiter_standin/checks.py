"""How the stand-in refuses what AITER would read wrongly.

AITER checks little: a wrong dtype, a view with strides or a lost mark gives wrong numbers there. Each is an error here.
"""

from __future__ import annotations

from enum import Enum
from types import SimpleNamespace

import torch

Tensor = torch.Tensor
BLOCK = 128
HALF = (torch.bfloat16, torch.float16)
POISON = float("nan")

# fp8 is frozen when AITER is imported; tests set it to the dialect that they are about.
dtypes = SimpleNamespace(
    bf16=torch.bfloat16, fp16=torch.float16, fp32=torch.float32, i8=torch.int8, fp8=torch.float8_e4m3fn
)


class ActivationType(Enum):
    Silu = 0
    Gelu = 1


class QuantType(Enum):
    No = 0
    per_Token = 2
    per_1x128 = 4


class GateMode(Enum):
    SEPARATED = "separated"


class StandinError(AssertionError):
    """A call that AITER would not have answered rightly."""


def demand(condition: object, words: str) -> None:
    if not condition:
        raise StandinError(words)


def tensor(x: object, name: str, dtype: torch.dtype | tuple[torch.dtype, ...], *shape: int | None) -> Tensor:
    """Demand a contiguous tensor; a None in the shape is any positive size."""
    demand(isinstance(x, Tensor), f"{name} is no tensor")
    assert isinstance(x, Tensor)
    demand(x.dtype in (dtype if isinstance(dtype, tuple) else (dtype,)), f"{name} is {x.dtype}, wants {dtype}")
    fits = x.dim() == len(shape) and all(w in (None, n) for n, w in zip(x.shape, shape, strict=True))
    demand(fits, f"{name} is {tuple(x.shape)}, wants {shape}")
    demand(x.numel() > 0, f"{name} is empty: AITER launches an empty grid")
    demand(x.is_contiguous(), f"{name} has the strides {x.stride()}")
    return x


def largest(dtype: torch.dtype) -> float:
    """Return the magnitude that AITER quantises to: the dtype's own largest, 240 in fnuz."""
    return torch.finfo(dtype).max


def norm(x: Tensor, weight: Tensor, epsilon: float, gemma: bool) -> Tensor:
    y = x.float()
    y = y / (y.pow(2).mean(-1, keepdim=True) + epsilon).sqrt()
    return (y * (weight.float() + (1.0 if gemma else 0.0))).to(x.dtype)
