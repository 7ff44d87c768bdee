"""The C entry points of kernels_hip, called with tensors. The library is found or built when a provider is bound."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import torch

from kernels_hip import build
from rocm_serve.errors import UserError
from rocm_serve.ops.hip_provider import CHUNK, MAX_WIDTH
from rocm_serve.platform.probe import gpus_seen_by_torch

# The struct that each entry point takes a pointer to, in the letters of Python's struct: P pointer, q int64, f float,
# i int. Tensors come first, the stream last. One argument, because ctypes takes longest over the number of them.
ENTRY_POINTS: Mapping[str, str] = MappingProxyType(
    {
        "rs_rms_norm": "PPPqqqqqfiP",
        "rs_add_rms_norm": "PPPPqqqqfiP",
        "rs_rms_norm_fp8": "PPPPPqqqfiP",
        "rs_gated_rms_norm": "PPPPqqqqqqqfiiP",
        "rs_qk_norm_rope": "PPPPPPPPPqqqqqqqqqfP",
    }
)

# Called with the tensors (None: a null pointer) and numbers of its struct, without the stream.
Launch = Callable[..., None]


class Library(Protocol):
    """What a provider calls: the real library here, the emulated one in evals/gfx."""

    def entry(self, name: str) -> Launch:
        """Return an entry point. Errors, of its calls: RuntimeError with the runtime's code."""


def packer(name: str) -> Callable[[tuple[torch.Tensor | int | float | None, ...], int], bytes]:
    """Return what makes the struct of an entry point out of the arguments of a launch and the stream."""
    layout = ENTRY_POINTS[name]
    pack = struct.Struct(f"@{layout}").pack
    pointers = len(layout) - len(layout.lstrip("P"))

    def packed(arguments: tuple[torch.Tensor | int | float | None, ...], stream: int) -> bytes:
        addresses = [0 if x is None else x.data_ptr() for x in arguments[:pointers]]  # type: ignore[union-attr]
        return pack(*addresses, *arguments[pointers:], stream)

    return packed


class LoadedLibrary:
    """The library in this process. Launches go to the current stream of the first tensor's device."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))

    def entry(self, name: str) -> Launch:
        function = getattr(self._library, name)
        function.argtypes, function.restype = [ctypes.c_char_p], ctypes.c_int
        packed = packer(name)
        # What torch.cuda.current_stream calls before it makes an object of the answer, which takes as long as a launch.
        stream_of: Callable[[int], int] = torch._C._cuda_getCurrentRawStream

        def launch(*arguments: torch.Tensor | int | float | None) -> None:
            device: int = arguments[0].get_device()  # type: ignore[union-attr]
            code = function(packed(arguments, stream_of(device)))
            if code:
                raise RuntimeError(f"{name}: the GPU runtime refused the launch with code {code}")

        return launch


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
    """Return `x` as the kernels read it: 16-byte chunks of the last dimension. Copied only where it is not so.

    The last dimension is a multiple of 8. Strides of dimensions of one are never multiplied with anything but zero.
    """
    if not x.data_ptr() % 16:
        if x.is_contiguous():
            return x
        strides = x.stride()
        if strides[-1] == 1 and not any(stride % CHUNK for stride in strides[:-1]):
            return x
    return x.clone(memory_format=torch.contiguous_format)


def check(op: str, x: torch.Tensor, max_width: int = MAX_WIDTH) -> int:
    """Return the width of rows, the last dimension. Errors: ValueError for rows that no kernel takes."""
    if x.dtype != torch.bfloat16:
        raise ValueError(f"{op} by hip takes bfloat16 rows, not {x.dtype}")
    width: int = x.shape[-1]
    if width % CHUNK or not 0 < width <= max_width:
        raise ValueError(f"{op} by hip takes a width that is a multiple of {CHUNK} up to {max_width}, not {width}")
    return width
