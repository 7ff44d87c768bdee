"""One run of the tuner on a GPU: compilers beside, groups one after the other, winners written as they come."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from concurrent.futures import TimeoutError as NotCompiled
from dataclasses import dataclass, field
from pathlib import Path

import torch

from rocm_serve.ops import tiles
from rocm_serve.ops.tiles import read_table
from rocm_serve.platform.probe import gpus_seen_by_torch
from rocm_serve.tuning.bench import bench_of
from rocm_serve.tuning.compiling import Compilers
from rocm_serve.tuning.flow import LEAST_GAIN, Group, gpu_timer, tune_group
from rocm_serve.tuning.outcome import Outcome, merged, words, write_report, write_table
from rocm_serve.tuning.wish import Wish


@dataclass(slots=True)
class Session:
    """What one run needs. `deadline` is of time.monotonic."""

    wish: Wish
    groups: Sequence[Group]
    device: torch.device
    out: Path
    report: Path | None
    deadline: float
    say: Callable[[str], object]
    outcomes: list[Outcome] = field(default_factory=list)

    def run(self, jobs: int) -> int:
        """Tune every group that the budget reaches. 0: all went well; 1: a tile was wrong or nothing ran."""
        compilers = Compilers(self.wish, jobs)
        try:
            for group in self.groups:
                group.compiled = [compilers.compile(group.points[0], group.asked[0], tile) for tile in group.tiles]
            left = self._tune()
        finally:
            compilers.stop()
        if left:
            self.say(f"not reached within the budget: {', '.join(' '.join(group.key) for group in left)}")
        won = sum(one.gain >= LEAST_GAIN for one in self.outcomes)
        self.say(f"{len(self.outcomes)} shapes tuned, {won} beat the rule: {self.out}")
        bad = [one for one in self.outcomes if one.best.us is None or any(t.why.startswith("wrong") for t in one.tried)]
        return int(bool(bad))

    def _tune(self) -> list[Group]:
        bench = bench_of(self.wish, self.device)
        timer = gpu_timer(self.device)
        for i, group in enumerate(self.groups):
            left = self.deadline - time.monotonic()
            if left <= 0:
                return list(self.groups[i:])
            try:
                one = tune_group(bench, group, timer, self.deadline, max(left, 1.0))
            except NotCompiled:
                return list(self.groups[i:])
            self._keep(one)
            gc.collect()
            torch.cuda.empty_cache()
        return []

    def _keep(self, one: Outcome) -> None:
        """Write a winner at once: a run may be cut short."""
        self.outcomes.append(one)
        write_table(self.out, merged(read_table(self.out), one, LEAST_GAIN))
        tiles.forget()
        self.say(words(one))
        if self.report is not None:
            gpu = gpus_seen_by_torch()
            machine = {"gpu": gpu.name, "arch": gpu.arch, "units": gpu.compute_units, "torch": gpu.torch_build}
            write_report(self.report, machine, self.outcomes)
