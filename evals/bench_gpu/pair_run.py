"""One run on a pair of GPUs: its budget, what it found, and where that goes."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from evals.bench_gpu.machine import describe
from evals.bench_gpu.pair_floor import PAIR_SHAPES
from evals.bench_gpu.pair_records import PairRun
from evals.bench_gpu.records import Failure
from rocm_serve.executor.device import dialect_of
from rocm_serve.ops.fp8 import FP8_DTYPES
from rocm_serve.tuning.floor import Ceilings
from rocm_serve.tuning.timing import measured_ceilings


class Measuring:
    """One run: its budget, what it found, and where that goes."""

    def __init__(self, arguments: argparse.Namespace, command: str, device: torch.device) -> None:
        self.arguments, self.device = arguments, device
        self.dims = PAIR_SHAPES[arguments.shape]
        self.of_tp1: list[float] = []  # log-probs that others are held against
        self._started = time.monotonic()
        self._until = self._started + arguments.budget_s
        copy, bf16, fp8 = measured_ceilings(device, FP8_DTYPES[dialect_of(device)])
        if device.type == "cuda":
            torch.cuda.empty_cache()
        self.ceilings = Ceilings(copy, bf16, fp8).at_least(Ceilings())
        self.run = PairRun(
            machine=describe(arguments.commit),
            command=command,
            seed=arguments.seed,
            shape=arguments.shape,
            measured_ceilings=(copy, bf16, fp8),
            ceilings=(self.ceilings.bytes_s, self.ceilings.bf16_s, self.ceilings.fp8_s),
        )

    def say(self, line: str) -> None:
        """Print a line with the time, and write the file anew."""
        print(f"[{time.monotonic() - self._started:5.0f} s] {line}", flush=True)
        self.run.write(self.arguments.json)

    def attempt(self, what: str, measure: Callable[[], object]) -> bool:
        """Take one point, unless the budget is spent; whatever ends it is written down. Returns whether all is well."""
        if time.monotonic() > self._until:
            self.run.left_out.append(what)
            return True
        try:
            measure()
            return True
        except Exception as error:  # the next point, or the next layout, may be all right
            self.run.failures.append(Failure(what, f"{type(error).__name__}: {error}"))
            self.say(f"FAILED {what}: {type(error).__name__}: {error}")
            return False
