"""The C entry points of kernels_hip, called with tensors. The library is found or built when a provider is bound."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import torch

from kernels_hip import build
from rocm_serve.errors import UserError
from rocm_serve.ops.hip_provider import CHUNK, MAX_WIDTH
from rocm_serve.platform.probe import gpus_seen_by_torch

# Arguments of each entry point: p pointer, l int64, f float, i int. The stream, a pointer too, comes last.
ENTRY_POINTS: Mapping[str, str] = MappingProxyType(
    {
        "rs_rms_norm": "ppplllllfip",
        "rs_add_rms_norm": "ppppllllfip",
        "rs_rms_norm_fp8": "ppppplllfip",
        "rs_gated_rms_norm": "pppplllllllfiip",
        "rs_qk_norm_rope": "ppppppppplllllllllfp",
    }
)
ARGUMENT_TYPES = {"p": ctypes.c_void_p, "l": ctypes.c_int64, "f": ctypes.c_float, "i": ctypes.c_int}


class Library(Protocol):
    """What a provider calls: the real library here, the emulated one in evals/gfx."""

    def call(self, name: str, *arguments: torch.Tensor | int | float | None) -> None:
        """Call an entry point. Errors: RuntimeError with the runtime's code."""


class LoadedLibrary:
    """The library in this process. Launches go to the current stream of the first tensor's device."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        self._functions = {name: getattr(library, name) for name in ENTRY_POINTS}
        for name, function in self._functions.items():
            function.argtypes = [ARGUMENT_TYPES[code] for code in ENTRY_POINTS[name]]
            function.restype = ctypes.c_int

    def call(self, name: str, *arguments: torch.Tensor | int | float | None) -> None:
        first = arguments[0]
        assert isinstance(first, torch.Tensor)
        plain = [a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments]
        code = self._functions[name](*plain, torch.cuda.current_stream(first.device).cuda_stream)
        if code:
            raise RuntimeError(f"{name}: the GPU runtime refused the launch with code {code}")


def why_missing() -> str | None:
    """Say why this machine cannot have the library, or None."""
    arch = gpus_seen_by_torch().arch
    if not arch:
        return "needs a GPU, and torch sees none here"
    try:
        return build.missing(build.target_of(arch))
    except build.BuildError as error:
        return str(error)


@cache
def loaded_library() -> Library:
    """Return this process's library for its GPU. Errors: UserError, one sentence."""
    try:
        return LoadedLibrary(build.library(build.target_of(gpus_seen_by_torch().arch)))
    except build.BuildError as error:
        raise UserError(f"HIP kernels: {error}") from error
    except OSError as error:
        raise UserError(f"HIP kernels: the library does not load: {error}") from error


def aligned(x: torch.Tensor) -> torch.Tensor:
    """Return `x` as the kernels read it: 16-byte chunks of the last dimension. Copied only where it is not so."""
    strides_fit = all(stride % CHUNK == 0 for stride in x.stride()[:-1])
    if x.stride(-1) == 1 and strides_fit and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def check(op: str, x: torch.Tensor, max_width: int = MAX_WIDTH) -> None:
    """Refuse rows that no kernel takes. Errors: ValueError saying what it takes."""
    if x.dtype != torch.bfloat16:
        raise ValueError(f"{op} by hip takes bfloat16 rows, not {x.dtype}")
    if x.shape[-1] % CHUNK or not 0 < x.shape[-1] <= max_width:
        raise ValueError(
            f"{op} by hip takes a width that is a multiple of {CHUNK} up to {max_width}, not {x.shape[-1]}"
        )
