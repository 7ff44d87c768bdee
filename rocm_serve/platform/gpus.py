"""GPUs that a launch can be planned for without having one. Pure.

Sizes in bytes: that of the H200 is what torch reports as total, the others are what is printed on them.
"""

from __future__ import annotations

from dataclasses import dataclass

from rocm_serve.errors import UserError
from rocm_serve.platform.facts import DeviceKind, Platform

GIB = 1 << 30
_MOST_GIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Gpu:
    """One kind of GPU. `hbm_bytes` is the memory of one."""

    name: str
    device: DeviceKind
    arch: str
    compute_units: int
    hbm_bytes: int

    def hosts(self, gpus_each: int) -> Platform:
        """Describe a host with `gpus_each` of them; cores and RAM decide nothing in a plan."""
        return Platform(
            device=self.device,
            arch=self.arch,
            num_gpus=gpus_each,
            compute_units=self.compute_units,
            hbm_bytes=self.hbm_bytes,
            gpu_name=self.name,
            cores=1,
            free_ram_bytes=0,
        )


GPUS = {
    "mi300x": Gpu("MI300X", "rocm", "gfx942", 304, 192 * GIB),
    "mi308x": Gpu("MI308X", "rocm", "gfx942", 80, 192 * GIB),
    "mi325x": Gpu("MI325X", "rocm", "gfx942", 304, 256 * GIB),
    "mi355x": Gpu("MI355X", "rocm", "gfx950", 256, 288 * GIB),
    "h200": Gpu("H200", "cuda", "sm_90", 132, 150_109_880_320),  # as seen; 143,771 MiB by nvidia-smi
}


def gpu_of(name: str | None, hbm_gib: float | None = None, *, or_else: str = "") -> Gpu | None:
    """Find the GPU that a plan is for; None when nothing was said about it.

    `hbm_gib` alone stands for an unnamed gfx942 GPU of that size, beside a name for that GPU with another size.
    `or_else`: what the command takes in place of a name. Errors: UserError naming the legal words.
    """
    if name is not None and name.lower() not in GPUS:
        raise UserError(f"--gpu {name}: legal: {', '.join(GPUS)}{or_else}")
    if hbm_gib is not None and not 0 < hbm_gib <= _MOST_GIB:
        raise UserError(f"--hbm-gib {hbm_gib:g}: legal: above 0, up to {_MOST_GIB}")
    if name is None:
        return None if hbm_gib is None else Gpu("GPU", "rocm", "gfx942", 304, int(hbm_gib * GIB))
    gpu = GPUS[name.lower()]
    if hbm_gib is None:
        return gpu
    return Gpu(gpu.name, gpu.device, gpu.arch, gpu.compute_units, int(hbm_gib * GIB))
