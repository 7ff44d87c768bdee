"""On what a run was made: card, driver, versions, commit."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
import time

import torch

from rocm_serve.agreement import source_hash
from rocm_serve.platform.probe import gpus_seen_by_torch

_PACKAGES = ("torch", "triton", "amd-aiter", "flash-attn", "flash-linear-attention", "fla-core", "numpy", "msgspec")


def describe(commit: str | None = None) -> dict[str, object]:
    """Name hardware and versions. `commit`: where git cannot say; the hash of the sources is known anywhere."""
    gpu = gpus_seen_by_torch()
    found: dict[str, object] = {
        "date": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "gpu": gpu.name or "none",
        "arch": gpu.arch or platform.machine(),
        "compute_units": gpu.compute_units,
        "memory_bytes": gpu.hbm_bytes,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "driver": _asked("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "commit": commit or _asked("git", "rev-parse", "--short", "HEAD"),
        "sources": source_hash(),
    }
    return found


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _asked(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None
