"""Small checkpoints of every layout. The fixture's are written once a session: tests that change one copy it first."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

LAYOUTS = {
    "text-fp8": ("text-fp8", "fp8"),
    "text-fp8-mtp-bf16": ("text-fp8", "bf16"),
    "text-bf16": ("text-bf16", "bf16"),
    "vl-fp8": ("vl-fp8", "fp8"),
    "dense": ("dense", "bf16"),
}


def small_checkpoint(path: Path, layout: Any, mtp: Any, *, seed: int, layers: int = 4) -> Path:
    """Write what `make_checkpoint` writes, but with two value heads a key head instead of eight, and return `path`.

    Their states are most of what a step of the default sizes costs on a CPU. It is legal wherever those are.
    """
    from rocm_serve.checkpoint.synthetic import write_model  # torch, which most tests do without
    from rocm_serve.checkpoint.synthetic_configs import Dims

    path.mkdir(parents=True, exist_ok=True)
    write_model(path, layout, mtp, replace(Dims(), value_heads=8, layers=layers), seed)
    return path


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Paths of four-layer checkpoints, by name of `LAYOUTS`."""
    root = tmp_path_factory.mktemp("checkpoints")
    return {name: small_checkpoint(root / name, layout, mtp, seed=7) for name, (layout, mtp) in LAYOUTS.items()}
