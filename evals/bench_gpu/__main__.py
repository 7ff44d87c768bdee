"""Decode and prefill on one GPU beside their floors.

    python -m evals.bench_gpu decode [--shape q35tp1 q38tp8] [--batch 1 16 ...] [--ctx 1024 ...] [--levels ops step]
    python -m evals.bench_gpu prefill [--shape q35tp1 q38tp8] [--rows 2048 ...] [--kinds single ...] [--levels ops step]
    python -m evals.bench_gpu table|plot --json FILE [--plot FILE]        of an earlier run

Floors are counted bytes and operations over the larger of the ceilings that this run measures and those known. Every
op is held against the reference before it is timed. What was found so far is printed and written as it comes; when the
budget is spent, the rest is named. Exit 0: all right. 1: an op is wrong or a point failed. 2: no GPU, or a bad wish.
"""

from __future__ import annotations

import argparse
import secrets
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import torch

from evals.bench_gpu import decode, op_level, prefill, prefill_level, stage, step_level
from evals.bench_gpu.measuring import Measuring
from evals.bench_gpu.plot import lines_of, lines_of_prefill, svg
from evals.bench_gpu.records import Run, markdown, table
from evals.bench_gpu.shown import show
from evals.program import at_least, seconds
from rocm_serve.config.load import parse_ops
from rocm_serve.errors import UserError
from rocm_serve.outputs import check_file, write_file
from rocm_serve.tuning.shapes import SHAPES

_PARTS = {"decode": (decode, step_level.TIMED_STEPS), "prefill": (prefill, prefill_level.TIMED_STEPS)}
_KINDS = ("single", "context", "short", "mixed")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m evals.bench_gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("part", choices=("decode", "prefill", "plot", "table"))
    made.add_argument("--shape", nargs="+", choices=tuple(SHAPES), default=["q35tp1", "q38tp8"])
    made.add_argument("--batch", nargs="+", type=at_least(1), default=list(decode.BATCHES))
    made.add_argument("--ctx", nargs="+", type=at_least(1), help="by default 1024 8192 32768, as far as shapes go")
    made.add_argument(
        "--rows", nargs="+", type=at_least(1), default=list(prefill.ROWS), help="prefill: tokens of one prompt"
    )
    made.add_argument(
        "--kinds",
        nargs="+",
        choices=_KINDS,
        default=list(_KINDS),
        help="prefill steps: one prompt of --rows;"
        " one after 30k tokens; 64 prompts of 128; one of 2048 beside 64 decodes",
    )
    made.add_argument(
        "--most", type=at_least(1), default=1 << 30, help="prefill: cut every size to this: a test of this program"
    )
    made.add_argument("--levels", nargs="+", choices=("ops", "step"), default=["step", "ops"], help="in this order")
    made.add_argument(
        "--modes",
        nargs="+",
        choices=("graphs", "ahead", "eager"),
        default=["graphs", "ahead", "eager"],
        help="decode steps: captured; captured, and each planned before the tokens of the last are known; neither",
    )
    made.add_argument("--only", nargs="+", help="ops level: names of cases, as experts attention gdn linear")
    made.add_argument(
        "--many", nargs="+", type=at_least(1), default=list(op_level.MANY_ROWS), help="rows of norms and the like"
    )
    made.add_argument("--steps", type=at_least(1), help="timed steps of a point: 40, of prefill 9")
    made.add_argument("--profile", action="store_true", help="list the kernels of each step with their times")
    made.add_argument("--op", nargs="+", default=[], metavar="OP=PROVIDER", help="as for serve")
    made.add_argument("--json", type=Path, help="write the figures to this file, after every point")
    made.add_argument("--plot", type=Path, help="write the plot to this SVG file")
    made.add_argument("--commit", help="what is measured, on a machine where git cannot say")
    made.add_argument(
        "--budget-s",
        type=seconds,
        default=1e9,
        help="begin no point after so many seconds; each shape and level has a part of them",
    )
    made.add_argument("--seed", type=at_least(0), default=secrets.randbits(31))
    made.add_argument("--cpu", action="store_true", help="run on a machine without a GPU: a test of this program")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    if arguments.part not in _PARTS:
        return show("bench_gpu", arguments.part, arguments.json, arguments.plot, Run, _drawn, markdown)
    part, default_steps = _PARTS[arguments.part]
    arguments.steps = arguments.steps or default_steps
    arguments.ctx = arguments.ctx or decode.contexts(arguments)
    try:
        for flag, file in (("--json", arguments.json), ("--plot", arguments.plot)):
            if file is not None:
                check_file(flag, file)
        arguments.op = parse_ops(arguments.op)
        device = stage.device_here()
        torch.manual_seed(arguments.seed)
        if device.type == "cpu" and not arguments.cpu:
            raise UserError("torch sees no GPU on this machine, so nothing was run; --cpu tries the program itself")
        stage.check_ops(arguments.shape, arguments.op)
        stage.check_length(arguments.shape, *part.longest(arguments))
        check_only(arguments.only, part.ops(arguments))
        run = Measuring(arguments, _command(argv or sys.argv[1:]), device)
        print(f"{run.run.machine['gpu']}, seed {arguments.seed}, ceilings {run.run.measured_ceilings}", flush=True)
        todo = list(product(arguments.levels, arguments.shape))
        for i, (level, name) in enumerate(todo):
            run.share(len(todo) - i)
            (part.ops_of_shape if level == "ops" else part.steps_of_shape)(run, name)
        for name, lines in run.run.bound.items():
            print(f"{name}: {'; '.join(lines)}")
        print("\n".join(table(run.run)))
        run.run.write(arguments.json)
        if arguments.plot is not None and (run.run.steps or run.run.prefills):
            write_file("--plot", arguments.plot, _drawn(run.run).encode())
    except UserError as error:
        print(f"bench_gpu: {error}", file=sys.stderr)
        return 2
    return int(bool(run.run.failures) or not all(one.right for one in run.run.ops))


def check_only(wished: Sequence[str] | None, points: Sequence[op_level.Make]) -> None:
    """Refuse a name of --only that no case has. Errors: UserError."""
    names = sorted({one.func.__name__ for one in points})
    for wish in wished or ():
        if wish not in names:
            raise UserError(f"--only {wish}: no such case; legal: {', '.join(names)}")


def _command(argv: Sequence[str]) -> str:
    """Write the command without the folders of one machine."""
    return " ".join(["python -m evals.bench_gpu", *(Path(word).name if "/" in word else word for word in argv)])


def _drawn(run: Run) -> str:
    what = run.machine["commit"] or f"sources {run.machine['sources']}"
    title = f"share of the floor of uniform routing: {run.machine['gpu']}, {what}"
    if run.prefills:
        return svg(lines_of_prefill(run.prefills), f"Prefill step, {title}", "tokens of one prompt")
    return svg(lines_of(run.steps), f"Decode step, {title}")


if __name__ == "__main__":
    sys.exit(main())
