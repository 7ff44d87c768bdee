"""What the machine is: one frozen value, asked for once by platform/probe.py and passed on. Imports no torch."""

from __future__ import annotations

from typing import Literal

import msgspec

DeviceKind = Literal["cpu", "cuda", "rocm"]
Fp8Dialect = Literal["fn", "fnuz", "none"]

# gfx942's matrix cores read the fnuz encoding only; gfx950 and NVIDIA from sm_89 on read OCP's. The CPU reference
# converts OCP bytes itself. Elsewhere FP8 is stored but has no instruction.
_FP8_OF_ARCH: dict[str, Fp8Dialect] = {"gfx942": "fnuz", "gfx950": "fn"}
_FIRST_SM_WITH_FP8 = 89
GPUS_WITH_FP8 = f"{', '.join(_FP8_OF_ARCH)}, sm_{_FIRST_SM_WITH_FP8} and later"


class Platform(msgspec.Struct, frozen=True, kw_only=True):
    """This host, as one rank sees it. Sizes in bytes."""

    device: DeviceKind
    arch: str  # "x86_64", "gfx942", "sm_90"
    num_gpus: int = 0
    compute_units: int = 0  # CUs or SMs of one GPU
    hbm_bytes: int = 0  # of one GPU
    gpu_name: str = ""
    cores: int  # that this process may use
    free_ram_bytes: int  # that this process may use

    @property
    def fp8_dialect(self) -> Fp8Dialect:
        return fp8_dialect(self.device, self.arch)

    def describe(self) -> str:
        """One line for the start-up report."""
        host = f"{self.cores} cores, {self.free_ram_bytes / 1e9:.1f} GB RAM free"
        if self.device == "cpu":
            return f"{self.arch} CPU, {host}"
        gpu = f"{self.num_gpus} x {self.gpu_name or self.arch} ({self.arch}, {self.compute_units} CUs"
        return f"{gpu}, {self.hbm_bytes / 1e9:.0f} GB, fp8 {self.fp8_dialect}); {host}"


def fp8_dialect(device: DeviceKind, arch: str) -> Fp8Dialect:
    """Name the encoding of e4m3 that the device's matrix instructions read."""
    if device == "cpu":
        return "fn"
    if device == "rocm":
        return _FP8_OF_ARCH.get(arch, "none")
    return "fn" if int(arch.removeprefix("sm_")) >= _FIRST_SM_WITH_FP8 else "none"


class GpuFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What torch says about the GPUs of this host; kind "none" when there is no usable one."""

    kind: Literal["none", "cuda", "rocm"]
    arch: str = ""
    num_gpus: int = 0
    compute_units: int = 0
    hbm_bytes: int = 0
    name: str = ""
    torch_build: str = ""
