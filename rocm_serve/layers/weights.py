"""Where layers get their parameters: a view of the parameter table from one module on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from rocm_serve.ops.bind import BoundOps
from rocm_serve.parallel.layout import Param, Place, shape_at

FP8 = torch.float8_e4m3fn  # as checkpoints have it


@dataclass(frozen=True, slots=True)
class Weights:
    """The table's parameters below `prefix`, as the rank at `place` holds them."""

    params: Mapping[str, Param]
    place: Place
    dtype: torch.dtype  # that the model runs in
    device: torch.device
    prefix: str = ""
    fp8: torch.dtype = FP8  # in the dialect of the device

    def under(self, name: str) -> Weights:
        """Return the view of a child module."""
        return replace(self, prefix=self._full(name))

    def has(self, name: str) -> bool:
        """Say whether the table has this parameter."""
        return self._full(name) in self.params

    def is_fp8(self, name: str) -> bool:
        """Say whether a parameter of the table is FP8, and so has a scale beside it."""
        return self.params[self._full(name)].dtype == "fp8"

    def make(self, name: str) -> nn.Parameter:
        """Allocate this rank's share of a parameter, uninitialised. It must be in the table."""
        param = self.params[self._full(name)]
        dtype = {"model": self.dtype, "float32": torch.float32, "fp8": self.fp8}[param.dtype]
        shape = shape_at(param, self.place)
        return nn.Parameter(torch.empty(shape, dtype=dtype, device=self.device), requires_grad=False)

    def _full(self, name: str) -> str:
        return f"{self.prefix}.{name}" if self.prefix else name


class OpWeights(nn.Module):
    """A module whose parameters are the weights of one op, which the op's provider may lay out its own way."""

    ops: BoundOps

    def op_weights(self) -> tuple[str, Mapping[str, str]]:
        """Name the op, and for each of its weights the attribute that holds it. An attribute may be None."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Replace loaded weights by what the bound provider reads. Both exist for a moment."""
        op, attributes = self.op_weights()
        held = {name: getattr(self, attribute) for name, attribute in attributes.items()}
        plain = {name: weight for name, weight in held.items() if weight is not None}
        for name, weight in self.ops.prepare(op, plain).items():
            if weight is plain[name]:
                continue
            parameter = nn.Parameter(weight, requires_grad=False)
            parameter.__dict__.update(weight.__dict__)  # the layout's tag, and marks of the provider's own library
            setattr(self, attributes[name], parameter)
