"""Triton kernels of the routed experts, interpreted in a process of its own: Triton chooses when it is imported."""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.ops.interpreted_experts import LIMITS

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed here")


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    seed = secrets.randbits(31)
    run = subprocess.run(
        [sys.executable, "-m", "tests.ops.interpreted_experts", str(seed)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, f"seed {seed}:\n{run.stderr[-4000:]}"
    return {"seed": seed, **json.loads(run.stdout.splitlines()[-1])}


@pytest.mark.parametrize("name", LIMITS)
def test_a_kernel_reads_and_writes_where_it_should(name: str, found: dict[str, Any]) -> None:
    assert isinstance(found[name], list), f"seed {found['seed']}: {found[name]}"
    assert all(e <= LIMITS[name] for e in found[name]), f"seed {found['seed']}: {found[name]} > {LIMITS[name]}"
