"""Which device a rank computes on, and what follows from it."""

from __future__ import annotations

import torch

from rocm_serve.config.schema import Resolved
from rocm_serve.parallel.mesh import Coord
from rocm_serve.platform.facts import Fp8Dialect, fp8_dialect
from rocm_serve.platform.probe import gpus_seen_by_torch

MODEL_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def device_of(resolved: Resolved, coord: Coord) -> torch.device:
    """Say which device a rank computes on: the ranks of one host take its GPUs in order."""
    if resolved.device == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", resolved.first_device + coord.rank - resolved.local_ranks.start)
    torch.cuda.set_device(device)
    return device


def arch_of(device: torch.device) -> tuple[str, int]:
    """Name the architecture that ops are chosen for, and count compute units; a CPU has none."""
    if device.type == "cpu":
        return "cpu", 0
    gpus = gpus_seen_by_torch()
    return gpus.arch, gpus.compute_units


def dialect_of(device: torch.device) -> Fp8Dialect:
    """Say which encoding of e4m3 the device's matrix instructions read."""
    if device.type == "cpu":
        return "fn"
    gpus = gpus_seen_by_torch()
    return fp8_dialect("rocm" if gpus.kind == "rocm" else "cuda", gpus.arch)
