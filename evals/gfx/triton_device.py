"""Triton without a GPU: a driver whose device is the emulator.

Triton asks the active driver for its target, compiles for it, and hands each launch to the driver's launcher.
Everything before that hand-over is Triton's own: specialisation of arguments, constants, the compiler, its cache.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from evals.gfx.device import Device, span
from evals.gfx.emulator.code_object import Value, own_arguments

# 3.9 warns that the default will be another one: this is the one that 3.5 to 3.9 have.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.driver import driver as triton_driver

_WAVE = 64
_LDS = {"gfx942": 64 * 1024, "gfx950": 160 * 1024}
_THREADS = 1024


class _Utilities:
    """What Triton loads a code object with."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def get_device_properties(self, index: int) -> Mapping[str, Any]:
        return {"max_shared_mem": _LDS[self._device.arch], "warpSize": _WAVE, "arch": self._device.arch}

    def load_binary(self, name: str, binary: bytes, shared: int, index: int) -> tuple[Any, Any, int, int, int]:
        path = self._device.folder / f"{name[:60]}-{abs(hash(binary)):016x}.hsaco"
        path.write_bytes(binary)
        return self, self._device.kernels(path)[name], 0, 0, _THREADS

    def unload_module(self, module: object) -> None:
        """Nothing is held."""


class EmulatedDriver(DriverBase):  # type: ignore[misc]
    """Triton's driver for one Device. Its device index tells Triton's own tables of the architectures apart."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.device = device
        self.utils = _Utilities(device)
        self.launcher_cls = lambda src, metadata: _Launcher(device, src, metadata)

    @staticmethod
    def is_active() -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_current_target(self) -> Any:
        return GPUTarget("hip", self.device.arch, _WAVE)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Any:
        raise NotImplementedError("nothing is timed in the emulator: tiles are chosen by shape and architecture")

    def get_current_device(self) -> int:
        return id(self.device)

    def set_current_device(self, index: int) -> None:
        """There is one."""

    def get_current_stream(self, index: int) -> int:
        return 0


class _Launcher:
    """One compiled kernel's launch: Triton calls it with the grid and every argument, constants among them."""

    def __init__(self, device: Device, src: Any, metadata: Any) -> None:
        self._device, self._metadata = device, metadata
        self._names = list(src.signature)
        self._kinds = list(src.signature.values())

    def __call__(self, x: int, y: int, z: int, stream: int, kernel: Any, *rest: Any) -> None:
        # rest: packed metadata, launch metadata, two hooks, then the arguments
        values: list[Value] = []
        buffers = []
        for name, kind, argument in zip(self._names, self._kinds, rest[4:], strict=True):
            if kind == "constexpr":
                continue
            if isinstance(argument, torch.Tensor):
                buffers.append(span(argument, name))
                values.append(argument.data_ptr())
            elif kind in ("fp32", "fp64", "fp16", "bf16"):
                values.append(float(argument))
            else:
                values.append(int(argument))
        missing = len(own_arguments(kernel.metadata)) - len(
            values
        )  # scratch that the compiler may ask for, and did not
        values += [0] * missing
        threads = self._metadata.num_warps * _WAVE
        dynamic = max(self._metadata.shared - kernel.descriptor.lds, 0)
        self._device.launch(kernel, (x, y, z), (threads, 1, 1), values, buffers, dynamic)


@contextmanager
def active(device: Device) -> Iterator[None]:
    """Make `device` the GPU that Triton sees."""
    before = triton_driver._active
    triton_driver.set_active(EmulatedDriver(device))
    try:
        yield
    finally:
        triton_driver._active = before
