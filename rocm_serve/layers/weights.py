"""Where layers get their parameters: a view of the parameter table from one module on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from rocm_serve.parallel.layout import Param, local_shape

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class Weights:
    """The table's parameters below `prefix`, as one tensor-parallel rank holds them."""

    params: Mapping[str, Param]
    tp: int
    tp_rank: int
    dtype: torch.dtype  # that the model runs in
    device: torch.device
    prefix: str = ""

    def under(self, name: str) -> Weights:
        """Return the view of a child module."""
        return replace(self, prefix=self._full(name))

    def has(self, name: str) -> bool:
        """Say whether the table has this parameter."""
        return self._full(name) in self.params

    def make(self, name: str) -> nn.Parameter:
        """Allocate this rank's share of a parameter, uninitialised. It must be in the table."""
        param = self.params[self._full(name)]
        dtype = {"model": self.dtype, "float32": torch.float32, "fp8": FP8}[param.dtype]
        shape = local_shape(param, self.tp, self.tp_rank)
        return nn.Parameter(torch.empty(shape, dtype=dtype, device=self.device), requires_grad=False)

    def _full(self, name: str) -> str:
        return f"{self.prefix}.{name}" if self.prefix else name
