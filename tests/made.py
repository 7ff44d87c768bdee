"""Fixture: one small checkpoint of every layout, written once a session. Tests that change one copy it first."""

from __future__ import annotations

from pathlib import Path

import pytest

LAYOUTS = {
    "text-fp8": ("text-fp8", "fp8"),
    "text-fp8-mtp-bf16": ("text-fp8", "bf16"),
    "text-bf16": ("text-bf16", "bf16"),
    "vl-fp8": ("vl-fp8", "fp8"),
    "dense": ("dense", "bf16"),
}


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Paths of four-layer checkpoints, by name of `LAYOUTS`."""
    from rocm_serve.checkpoint.synthetic import make_checkpoint  # torch, which most tests do without

    root = tmp_path_factory.mktemp("checkpoints")
    return {
        name: make_checkpoint(root / name, layout, mtp, seed=7, layers=4) for name, (layout, mtp) in LAYOUTS.items()
    }
