"""Decode on one GPU beside its floor.

    python -m evals.bench_gpu decode [--shape q35tp1 q38tp8] [--batch 1 16 ...] [--ctx 1024 ...] [--levels ops step]
    python -m evals.bench_gpu table|plot --json FILE [--plot FILE]        of an earlier run

Floors are counted bytes and operations over the larger of the ceilings that this run measures and those known. Every
op is held against the reference before it is timed. What was found so far is printed and written as it comes; when the
budget is spent, the rest is named. Exit 0: all right. 1: an op is wrong or a point failed. 2: no GPU, or a bad wish.
"""

from __future__ import annotations

import argparse
import gc
import secrets
import sys
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import msgspec
import torch

from evals.bench_gpu import op_level, stage, step_level
from evals.bench_gpu.machine import describe
from evals.bench_gpu.plot import svg
from evals.bench_gpu.records import (
    Failure,
    OpRecord,
    Run,
    StepRecord,
    kernel_lines,
    markdown,
    op_line,
    step_line,
    table,
)
from rocm_serve.config.load import parse_ops
from rocm_serve.errors import UserError
from rocm_serve.executor.loading import MODEL_DTYPES, LoadedStage, dialect_of
from rocm_serve.ops.bind import binding_lines
from rocm_serve.ops.fp8 import FP8_DTYPES
from rocm_serve.platform.probe import free_device_bytes, usable_cores
from rocm_serve.tuning import floor
from rocm_serve.tuning.floor import Ceilings
from rocm_serve.tuning.operands import Bench
from rocm_serve.tuning.shapes import SHAPES
from rocm_serve.tuning.timing import measured_ceilings
from rocm_serve.tuning.wish import Point

BATCHES = (1, 8, 16, 64, 256)
CONTEXTS = (1024, 8192, 32768)
_FIRST_CONTEXT = {"q35tp1": 1024, "q38tp8": 8192}  # where vLLM was measured, and aims are
_STEP_SLOTS = 8  # more than the largest batch
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

    def found(self, record: OpRecord | StepRecord | Failure) -> None:
        """Keep a record, print it, and write the file anew."""
        if isinstance(record, OpRecord):
            self.run.ops.append(record)
            line = op_line(record)
        elif isinstance(record, StepRecord):
            self.run.steps.append(record)
            line = step_line(record)
        else:
            self.run.failures.append(record)
            line = f"FAILED {record.what}: {record.error}"
        print(f"[{time.monotonic() - self._started:5.0f} s] {line}", flush=True)
        if isinstance(record, StepRecord) and record.kernels:
            print("\n".join(kernel_lines(record)), flush=True)
        self.run.write(self.arguments.json)

    def failed(self, what: str, error: Exception) -> None:
        self.found(Failure(what, f"{type(error).__name__}: {error}".splitlines()[0]))

    def clean(self, *, thoroughly: bool = False) -> None:
        """Give memory back. `thoroughly`: also what cycles hold, as tracebacks and models are held."""
        if thoroughly:
            gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def ops_of_shape(run: Measuring, name: str) -> None:
    """Measure the ops of one shape."""
    a = run.arguments
    rank = stage.rank_of(name, running=max(a.batch), longest=max(a.ctx) + 64, op=a.op)
    run.run.bound[name] = list(binding_lines(rank.ops.report))
    dtype, fp8 = MODEL_DTYPES[rank.resolved.dtype], FP8_DTYPES[dialect_of(rank.device)]
    bench = Bench(SHAPES[name], rank.ops, rank.device, dtype, fp8, a.seed)
    makes = [
        make
        for make in op_level.op_points(a.batch, a.ctx, a.many)
        if not a.only or make.func.__name__ in a.only  # type: ignore[attr-defined]
    ]
    _compile(run, rank, [Point(make.func.__name__, make.keywords) for make in makes])
    for make in makes:
        what = f"{name} {make.func.__name__} {make.keywords}"  # type: ignore[attr-defined]
        if not run.reached(what):
            continue
        try:
            run.found(op_level.measure(bench, name, make, run.ceilings))
        except Exception as error:  # whatever ends a point is written down, and the next one is tried
            run.failed(what, error)
            run.clean(thoroughly=True)
        run.clean()


def _points_of_steps(batches: Sequence[int]) -> list[Point]:
    """Name the calls of a step whose kernels have a tile for each batch."""
    names = ("experts", "attention", "step", "conv", "head", "norms", "route", "qk", "shared_add")
    more: dict[str, dict[str, int]] = {"attention": {"context": 1024}, "norms": {"residual": True}}
    return [Point(name, {"rows": rows, **more.get(name, {})}) for name in names for rows in batches]


def _compile(run: Measuring, rank: stage.Rank, points: Sequence[Point]) -> None:
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


def steps_of_shape(run: Measuring, name: str) -> None:
    """Measure whole steps of one shape, its model built once."""
    a = run.arguments
    wished = list(step_level.points(a.batch, a.ctx, _FIRST_CONTEXT.get(name, min(a.ctx))))
    if not run.reached(f"{name}: all steps"):
        return
    margin = step_level.WARM_UP_STEPS + a.steps + 32
    longest = max(context for _, context in wished) + margin
    rank = stage.rank_of(name, running=max(a.batch), longest=longest, op=a.op)
    run.run.bound[name] = list(binding_lines(rank.ops.report))
    _compile(run, rank, _points_of_steps(a.batch))
    loaded = stage.load(rank, a.seed)
    modes = list(a.modes)
    if "graphs" in modes and loaded.graph_refusal is not None:
        run.run.left_out.append(f"{name}: graphs: {loaded.graph_refusal}")
        modes.remove("graphs")
    _steps_of_stage(run, name, modes, loaded, wished, margin)
    del loaded, rank
    run.clean(thoroughly=True)


def _steps_of_stage(
    run: Measuring,
    name: str,
    modes: Sequence[str],
    loaded: LoadedStage,
    wished: Sequence[tuple[int, int]],
    margin: int,
) -> None:
    a = run.arguments
    slots = max(batch for batch, _ in wished) + _STEP_SLOTS
    fits = _tokens_that_fit(loaded, slots)
    tokens = max(
        (batch * (context + margin) for batch, context in wished if batch * (context + margin) <= fits), default=0
    )
    page = loaded.resolved.page_size
    runner = loaded.runner(num_pages=-(-tokens // page) + slots, num_slots=slots)
    step_level.randomise(runner.cache, torch.Generator(run.device).manual_seed(a.seed))
    for i, (mode, (batch, context)) in enumerate(product(modes, wished)):
        what = f"{name} {mode} step B {batch} ctx {context}"
        if batch * (context + margin) > tokens:
            run.run.left_out.append(f"{what} (does not fit the memory)")
            continue
        if not run.reached(what):
            continue
        try:
            how = {"captured": mode == "graphs", "steps": a.steps, "profile": a.profile}
            found = step_level.measure(loaded, runner, batch, context, (i + 1) << 16, **how)
        except Exception as error:  # whatever ends a point is written down, and the next one is tried
            run.failed(what, error)
            continue
        run.found(_step_record(run, name, mode, batch, context, found))


def _tokens_that_fit(loaded: LoadedStage, slots: int) -> int:
    """Return how many tokens of KV the device holds beside the weights, the slots and some room for a step."""
    page = loaded.resolved.page_size
    if loaded.device.type == "cpu":
        return 1 << 14
    free, total = free_device_bytes(0)
    free += torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    left = free - slots * loaded.slot_bytes - total // 16
    return max(0, left // loaded.page_bytes) * page


def _step_record(
    run: Measuring, name: str, mode: str, batch: int, context: int, found: step_level.StepFinding
) -> StepRecord:
    dims = SHAPES[name]
    uniform = floor.expected_distinct(dims.experts, dims.top_k, batch)
    parts = floor.step(dims, batch, context, found.distinct)
    least = floor.seconds(parts, run.ceilings) * 1e3
    even = floor.seconds(floor.step(dims, batch, context, [uniform] * dims.layers), run.ceilings) * 1e3
    return StepRecord(
        shape=name,
        mode=mode,
        batch=batch,
        context=context,
        wall_ms=found.wall,
        low=found.wall_low,
        high=found.wall_high,
        device_ms=found.device,
        device_how=found.device_how,
        floor_ms=least,
        uniform_floor_ms=even,
        ratio=least / found.wall,
        uniform_ratio=even / found.wall,
        distinct=sum(found.distinct) / len(found.distinct),
        uniform_distinct=uniform,
        kernels=found.kernels,
        parts_ms={cost.op: cost.seconds(run.ceilings) * 1e3 for cost in parts},
    )


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m evals.bench_gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("part", choices=("decode", "plot", "table"))
    made.add_argument("--shape", nargs="+", choices=tuple(SHAPES), default=["q35tp1", "q38tp8"])
    made.add_argument("--batch", nargs="+", type=int, default=list(BATCHES))
    made.add_argument("--ctx", nargs="+", type=int, default=list(CONTEXTS))
    made.add_argument("--levels", nargs="+", choices=("ops", "step"), default=["step", "ops"], help="in this order")
    made.add_argument("--modes", nargs="+", choices=("graphs", "eager"), default=["graphs", "eager"])
    made.add_argument("--only", nargs="+", help="ops level: names of cases, as experts attention gdn linear")
    made.add_argument(
        "--many", nargs="+", type=int, default=list(op_level.MANY_ROWS), help="rows of norms and the like"
    )
    made.add_argument("--steps", type=int, default=step_level.TIMED_STEPS, help="timed steps of a point")
    made.add_argument("--profile", action="store_true", help="list the kernels of each captured step with their times")
    made.add_argument("--op", nargs="+", default=[], metavar="OP=PROVIDER", help="as for serve")
    made.add_argument("--json", type=Path, help="write the figures to this file, after every point")
    made.add_argument("--plot", type=Path, help="write the plot to this SVG file")
    made.add_argument("--commit", help="what is measured, on a machine where git cannot say")
    made.add_argument("--budget-s", type=float, default=1e9, help="begin no point after so many seconds")
    made.add_argument("--seed", type=int, default=secrets.randbits(31))
    made.add_argument("--cpu", action="store_true", help="run on a machine without a GPU: a test of this program")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    if arguments.part != "decode":
        return _show(arguments)
    try:
        arguments.op = parse_ops(arguments.op)
        device = stage.device_here()
        torch.manual_seed(arguments.seed)
        if device.type == "cpu" and not arguments.cpu:
            raise UserError("torch sees no GPU on this machine, so nothing was run; --cpu tries the program itself")
        run = Measuring(arguments, _command(argv or sys.argv[1:]), device)
        print(f"{run.run.machine['gpu']}, seed {arguments.seed}, ceilings {run.run.measured_ceilings}", flush=True)
        todo = list(product(arguments.levels, arguments.shape))
        for i, (level, name) in enumerate(todo):
            run.share(len(todo) - i)
            (ops_of_shape if level == "ops" else steps_of_shape)(run, name)
    except UserError as error:
        print(f"bench_gpu: {error}", file=sys.stderr)
        return 2
    run.run.write(arguments.json)
    for name, lines in run.run.bound.items():
        print(f"{name}: {'; '.join(lines)}")
    print("\n".join(table(run.run)))
    if arguments.plot is not None and run.run.steps:
        arguments.plot.write_text(svg(run.run.steps, _title(run.run)))
    return int(bool(run.run.failures) or not all(one.right for one in run.run.ops))


def _command(argv: Sequence[str]) -> str:
    """Write the command without the folders of one machine."""
    return " ".join(["python -m evals.bench_gpu", *(Path(word).name if "/" in word else word for word in argv)])


def _show(arguments: argparse.Namespace) -> int:
    """Draw or write out what an earlier run found."""
    if arguments.json is None or (arguments.part == "plot" and arguments.plot is None):
        print("bench_gpu: plot and table read --json FILE, and plot writes --plot FILE", file=sys.stderr)
        return 2
    run = msgspec.json.decode(arguments.json.read_bytes(), type=Run)
    if arguments.part == "plot":
        arguments.plot.write_text(svg(run.steps, _title(run)))
    else:
        print("\n".join(markdown(run)))
    return 0


def _title(run: Run) -> str:
    what = run.machine["commit"] or f"sources {run.machine['sources']}"
    return f"Decode step, share of the floor of uniform routing: {run.machine['gpu']}, {what}"


if __name__ == "__main__":
    sys.exit(main())
