"""Runs trials on one architecture: in a process of its own, so that both architectures use both cores."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from evals.gfx.device import Device
from evals.gfx.judge import Verdict, run_trial
from evals.gfx.kernels import TRIALS
from evals.gfx.registry import Arch


def run_arch(arch: Arch, names: Sequence[str], *, execute: bool, seed: int) -> list[Verdict]:
    """Run trials by name on one architecture, saying each."""
    torch.set_num_threads(1)
    verdicts = []
    chosen = set(names)
    with tempfile.TemporaryDirectory(prefix="gfx-") as folder:
        device = Device(arch, Path(folder), execute)
        for trial in TRIALS:
            if trial.name in chosen and arch in trial.archs and not (execute and trial.compile_only):
                verdict = run_trial(trial, device, seed)
                print(_line(verdict, execute), flush=True)
                verdicts.append(verdict)
    return verdicts


def _line(v: Verdict, execute: bool) -> str:
    done = f"{v.instructions:>9} {v.error:8.1e} {v.differing:>6} of {v.elements:<8}" if execute else ""
    return f"{v.arch}  {v.trial:60}{done}{v.seconds:6.1f} s  {'; '.join(v.faults) or 'ok'}"
