"""The HIP kernels without a GPU: the entry points run on this CPU, their launches go to the emulator."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from evals.gfx.device import Buffer, Device, span
from evals.gfx.emulator.code_object import Value, own_arguments
from evals.gfx.emulator.machine import Kernel
from evals.gfx.toolchain import device_objects, host_library
from rocm_serve.ops.hip_library import Launch, packer

_LAUNCHER = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint, ctypes.POINTER(ctypes.c_void_p)
)
_FAILED = 1


class EmulatedLibrary:
    """Stands in for hip_library.LoadedLibrary: the same calls, the same entry points, another device."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._library = ctypes.CDLL(str(host_library(device.folder)))
        self._kernels: dict[int, Kernel] = {}
        for path in device_objects(device.arch, device.folder):
            for name, kernel in device.kernels(path).items():
                symbol = ctypes.c_char.in_dll(self._library, name)
                self._kernels[ctypes.addressof(symbol)] = kernel
        self._launcher = _LAUNCHER(self._launch)  # held: the library keeps its address only
        self._library.rs_offline_set_launcher(self._launcher)
        self._buffers: list[Buffer] = []
        self._error: Exception | None = None

    def entry(self, name: str) -> Launch:
        """Return an entry point, whose tensors are all that its kernels may touch. Errors: those of the emulator."""
        function = getattr(self._library, name)
        function.argtypes, function.restype = [ctypes.c_char_p], ctypes.c_int
        packed = packer(name)

        def launch(*arguments: torch.Tensor | int | float | None) -> None:
            self._buffers = [span(a) for a in arguments if isinstance(a, torch.Tensor)]
            self._error = None
            code = function(packed(arguments, 0))  # there is no stream
            if self._error is not None:
                raise self._error
            if code:
                raise RuntimeError(f"{name}: code {code}")

        return launch

    def _launch(self, kernel: int, blocks: int, threads: int, arguments: Any) -> int:
        # An exception must not go through C: it is kept and raised by `call`.
        try:
            found = self._kernels[kernel]
            own = own_arguments(found.metadata)
            values: list[Value] = [ctypes.string_at(arguments[k], own[k][".size"]) for k in range(len(own))]
            self._device.launch(found, (blocks, 1, 1), (threads, 1, 1), values, self._buffers)
        except Exception as error:
            self._error = error
            return _FAILED
        return 0


def library_of(device: Device) -> EmulatedLibrary:
    """Return the device's library, compiled when it is first asked for."""
    if device.library is None:
        device.library = EmulatedLibrary(device)
    found: EmulatedLibrary = device.library
    return found
