"""What the tests on a GPU share."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ops.on_gpu import SEED, SEED_VARIABLE

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def compiled() -> None:
    """Compile in as many processes as there are cores to spare: one after the other takes minutes."""
    count = min(12, len(os.sched_getaffinity(0)) - 1)
    if count < 2:
        return
    command = [sys.executable, "-m", "tests.ops.on_gpu"]
    environ = {**os.environ, SEED_VARIABLE: str(SEED), "OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen(
            [*command, str(i), str(count)], cwd=ROOT, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        for i in range(count)
    ]
    try:
        for process in running:
            process.wait(timeout=300)
    finally:
        for process in running:
            process.kill()
