"""What a process has used, and on what machine and with which versions it ran."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = (
    "torch",
    "uvicorn",
    "uvloop",
    "httptools",
    "starlette",
    "fastapi",
    "msgspec",
    "pyzmq",
    "numpy",
    "tokenizers",
)


def cpu_seconds(pids: Iterable[int]) -> float:
    """Return the CPU time (user and system) that these processes have used so far, all threads, to the nanosecond."""
    total = 0
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").iterdir():
            total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


def describe() -> dict[str, object]:
    """Name machine, versions and commit."""
    info = Path("/proc/cpuinfo").read_text().splitlines()
    cpus = [line.partition(":")[2].strip() for line in info if line.startswith("model name")]
    return {
        "cpu": cpus[0] if cpus else platform.processor(),
        "cores": len(cpus),
        "load_average": Path("/proc/loadavg").read_text().split()[:3],
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "commit": _commit(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    asked = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return asked.stdout.strip() or None
