"""What NVIDIA's driver says of processes and memory on the GPUs of this host."""

from __future__ import annotations

import subprocess


def used_mib() -> list[int]:
    """Return the memory in use of each GPU, whoever holds it."""
    return [int(line) for line in _asked("--query-gpu=memory.used")]


def pids() -> set[int]:
    """Return the processes that hold memory of a GPU."""
    return {int(line) for line in _asked("--query-compute-apps=pid")}


def _asked(what: str) -> list[str]:
    command = ["nvidia-smi", what, "--format=csv,noheader,nounits"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
