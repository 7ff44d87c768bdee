"""Every trial of every provider's kernels, and the kernels that no trial executes: those of all kernels_*.py here."""

from __future__ import annotations

import importlib
from pathlib import Path

from evals.gfx.registry import NotEmulated, Trial

_MODULES = [
    importlib.import_module(f"evals.gfx.{path.stem}") for path in sorted(Path(__file__).parent.glob("kernels_*.py"))
]
TRIALS: tuple[Trial, ...] = tuple(trial for module in _MODULES for trial in module.TRIALS)
NOT_EMULATED: tuple[NotEmulated, ...] = tuple(
    entry for module in _MODULES for entry in getattr(module, "NOT_EMULATED", ())
)
