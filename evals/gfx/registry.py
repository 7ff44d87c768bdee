"""What a trial is: one small call of one provider, judged by the reference of its op."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from rocm_serve.ops.contract import Arguments, OpFunction

Arch = Literal["gfx942", "gfx950"]
ARCHS: tuple[Arch, ...] = ("gfx942", "gfx950")
Outputs = tuple[torch.Tensor, ...]
LIMIT = 5e-3  # relative L2 against the reference of the same semantics


def fp8_dtype(arch: Arch) -> torch.dtype:
    """Return the dtype of e4m3 that the matrix cores of `arch` read."""
    return torch.float8_e4m3fnuz if arch == "gfx942" else torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class Trial:
    """One call. Its outputs are the op's result and the arguments that the op mutates.

    `call` stands in for calling the provider's function with the arguments: for a provider that has no op yet, or that
    is judged on a part of its outputs; it takes the function and the arguments and returns the outputs. `expected` does
    the same in place of the reference. `function` is given where the op's table does not hold the provider, or where
    the provider must be told of the device: it takes the device (evals/gfx/device.py).
    `exact` returns the outputs before they are rounded, in float64: then the bits must be those of the reference, but
    where that value lies on the boundary between two, within the noise of fp32.
    """

    op: str
    provider: str
    case: str
    arguments: Callable[[torch.Generator, Arch], Arguments]
    kernels: tuple[str, ...]
    limit: float = LIMIT
    native_fp8: tuple[str, ...] = ()
    compile_only: bool = False
    exceptions: Mapping[str, str] = field(default_factory=dict)  # "check" or "kernel:check" -> why it cannot hold
    archs: tuple[Arch, ...] = ARCHS
    function: Callable[[Any], OpFunction] | None = None
    call: Callable[[OpFunction, Arguments], Outputs] | None = None
    expected: Callable[[Arguments], Outputs] | None = None
    exact: Callable[[Arguments], Outputs] | None = None

    @property
    def name(self) -> str:
        return f"{self.op} {self.provider} {self.case}"


@dataclass(frozen=True, slots=True)
class NotEmulated:
    """A kernel that has no trial which is executed, and why. Listed in kernels.py; shown in docs/evidence.md."""

    op: str
    provider: str
    kernel: str
    why: str
