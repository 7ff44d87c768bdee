"""One run of the benchmark: its budget, what it found, and what decode and prefill do alike."""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Sequence

import torch

from evals.bench_gpu import op_level, stage
from evals.bench_gpu.machine import describe
from evals.bench_gpu.prefill_records import PrefillRecord, prefill_kernel_lines, prefill_line
from evals.bench_gpu.records import Failure, OpRecord, Run, StepRecord, kernel_lines, op_line, step_line
from rocm_serve.executor.device import MODEL_DTYPES, dialect_of
from rocm_serve.executor.loaded_stage import LoadedStage
from rocm_serve.ops.bind import binding_lines
from rocm_serve.ops.fp8 import FP8_DTYPES
from rocm_serve.platform.probe import free_device_bytes, usable_cores
from rocm_serve.tuning.floor import Ceilings
from rocm_serve.tuning.operands import Bench
from rocm_serve.tuning.shapes import SHAPES
from rocm_serve.tuning.timing import measured_ceilings
from rocm_serve.tuning.wish import Point

_MOST_COMPILERS = 16


class Measuring:
    """One run: its budget, what it found, and where that goes."""

    def __init__(self, arguments: argparse.Namespace, command: str, device: torch.device) -> None:
        self.arguments, self.device = arguments, device
        self._started = time.monotonic()
        self._until = self._started + arguments.budget_s
        copy, bf16, fp8 = measured_ceilings(device, FP8_DTYPES[dialect_of(device)])
        self.ceilings = Ceilings(copy, bf16, fp8).at_least(Ceilings())
        used = (self.ceilings.bytes_s, self.ceilings.bf16_s, self.ceilings.fp8_s)
        self.run = Run(
            machine=describe(arguments.commit),
            command=command,
            seed=arguments.seed,
            measured_ceilings=(copy, bf16, fp8),
            ceilings=used,
        )

    def share(self, parts: int) -> None:
        """Give what comes now one of `parts` equal shares of the time that is left."""
        now = time.monotonic()
        self._until = now + (self._started + self.arguments.budget_s - now) / parts

    def left_s(self) -> float:
        """Return the seconds left of this share."""
        return max(1.0, self._until - time.monotonic())

    def reached(self, what: str) -> bool:
        """Whether time is left for another point; else it is named among those left out."""
        if time.monotonic() < self._until:
            return True
        self.run.left_out.append(what)
        return False

    def found(self, record: OpRecord | StepRecord | PrefillRecord | Failure) -> None:
        """Keep a record, print it, and write the file anew."""
        kernels: list[str] = []
        match record:
            case OpRecord():
                self.run.ops.append(record)
                line = op_line(record)
            case StepRecord():
                self.run.steps.append(record)
                line, kernels = step_line(record), kernel_lines(record)
            case PrefillRecord():
                self.run.prefills.append(record)
                line, kernels = prefill_line(record), prefill_kernel_lines(record)
            case Failure():
                self.run.failures.append(record)
                line = f"FAILED {record.what}: {record.error}"
        print("\n".join([f"[{time.monotonic() - self._started:5.0f} s] {line}", *kernels]), flush=True)
        self.run.write(self.arguments.json)

    def failed(self, what: str, error: Exception) -> None:
        self.found(Failure(what, f"{type(error).__name__}: {error}".splitlines()[0]))

    def clean(self, *, thoroughly: bool = False) -> None:
        """Give memory back. `thoroughly`: also what cycles hold, as tracebacks and models are held."""
        if thoroughly:
            gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def ops_of_shape(run: Measuring, name: str, makes: Sequence[op_level.Make], rank: stage.Rank) -> None:
    """Measure these ops of one shape."""
    a = run.arguments
    run.run.bound[name] = list(binding_lines(rank.ops.report))
    dtype, fp8 = MODEL_DTYPES[rank.resolved.dtype], FP8_DTYPES[dialect_of(rank.device)]
    bench = Bench(SHAPES[name], rank.ops, rank.device, dtype, fp8, a.seed)
    makes = [make for make in makes if not a.only or make.func.__name__ in a.only]
    compile_points(run, rank, [Point(make.func.__name__, make.keywords) for make in makes])
    for make in makes:
        what = f"{name} {make.func.__name__} {make.keywords}"
        if not run.reached(what):
            continue
        try:
            run.found(op_level.measure(bench, name, make, run.ceilings))
        except Exception as error:  # whatever ends a point is written down, and the next one is tried
            run.failed(what, error)
            run.clean(thoroughly=True)
        run.clean()


def compile_points(run: Measuring, rank: stage.Rank, points: Sequence[Point]) -> None:
    """Compile what these calls launch in several processes, before anything is timed."""
    if rank.device.type == "cpu":
        return
    began = time.monotonic()
    failed = stage.compile_beside(rank, points, min(usable_cores(), _MOST_COMPILERS), run.left_s())
    print(
        f"{rank.name}: {len(points)} calls compiled in {time.monotonic() - began:.0f} s",
        *failed,
        sep="\n  ",
        flush=True,
    )


def tokens_that_fit(loaded: LoadedStage, slots: int) -> int:
    """Return how many tokens of KV the device holds beside the weights, the slots and some room for a step."""
    page = loaded.resolved.page_size
    if loaded.device.type == "cpu":
        return 1 << 14
    free, total = free_device_bytes(0)
    free += torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    left = free - slots * loaded.slot_bytes - total // 16
    return max(0, left // loaded.page_bytes) * page
