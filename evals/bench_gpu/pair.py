"""One model on one GPU and on two, served by the product's own processes, beside the floor.

    python -m evals.bench_gpu.pair run [--layouts tp1 tp2 pp2 pp2-ahead] [--batch 16 ...] [--prefill ...] [--json FILE]
    python -m evals.bench_gpu.pair table|plot --json FILE [--plot FILE]        of an earlier run

All layouts are started at once, so they must fit the GPUs together (--one-by-one: they need not); then they are asked
in turn, and who is not asked does nothing. Requests decode random tokens after random prompts. Weights are random and
made on the device. What the link carries is measured first. What was found so far is printed and written as it comes.
Exit 0: all right. 1: a point failed. 2: too few GPUs, or a bad wish.
"""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from evals.bench_gpu import stage
from evals.bench_gpu.pair_before import compile_ahead, measure_link
from evals.bench_gpu.pair_floor import LAYOUTS, PAIR_SHAPES, RANKS
from evals.bench_gpu.pair_plot import svg
from evals.bench_gpu.pair_points import measure_layouts
from evals.bench_gpu.pair_records import PairRun, markdown, table
from evals.bench_gpu.pair_run import Measuring
from evals.bench_gpu.shown import show
from rocm_serve.config.load import parse_ops
from rocm_serve.errors import UserError
from rocm_serve.outputs import check_file, write_file
from rocm_serve.tuning.shapes import config_of

BATCHES = (16, 64, 1, 256)
PREFILLS = (16, 1, 64)
DEFAULT_LAYOUTS = ("tp1", "tp2", "pp2")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m evals.bench_gpu.pair",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("part", choices=("run", "table", "plot"))
    made.add_argument("--shape", choices=tuple(PAIR_SHAPES), default="q35tp1")
    made.add_argument("--layouts", nargs="+", choices=tuple(LAYOUTS), default=list(DEFAULT_LAYOUTS))
    made.add_argument("--batch", nargs="+", type=int, default=list(BATCHES), help="the first three before prompts")
    made.add_argument("--prefill", nargs="*", type=int, default=list(PREFILLS), help="prompts that come at once")
    made.add_argument("--ctx", type=int, default=1024, help="tokens before requests decode")
    made.add_argument("--prompt", type=int, default=2048, help="tokens of a prompt where only prompts are computed")
    made.add_argument(
        "--chunk", type=int, default=2048, help="--chunked-prefill-size; one of it and --prompt divides the other"
    )
    made.add_argument("--steps", type=int, default=40, help="timed steps of a point")
    made.add_argument("--one-by-one", action="store_true", help="start a layout when the one before has ended")
    made.add_argument("--eager", action="store_true", help="--enforce-eager")
    made.add_argument("--mem-fraction", type=float, default=None)
    made.add_argument("--op", nargs="+", default=[], metavar="OP=PROVIDER", help="as for serve")
    made.add_argument("--compile-s", type=float, default=60.0, help="seconds for kernels that are compiled ahead")
    made.add_argument("--json", type=Path, help="write the figures to this file, after every point")
    made.add_argument("--plot", type=Path, help="write the timelines of two stages to this SVG file")
    made.add_argument("--commit", help="what is measured, on a machine where git cannot say")
    made.add_argument("--budget-s", type=float, default=1e9, help="begin no point after so many seconds")
    made.add_argument("--seed", type=int, default=secrets.randbits(31))
    made.add_argument("--device", choices=("auto", "cpu"), default="auto", help="cpu: a test of this program")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    if arguments.part != "run":
        return show("pair", arguments.part, arguments.json, arguments.plot, PairRun, _picture, markdown)
    try:
        for flag, file in (("--json", arguments.json), ("--plot", arguments.plot)):
            if file is not None:
                check_file(flag, file)
        arguments.op = parse_ops(arguments.op)
        device = torch.device("cpu") if arguments.device == "cpu" else stage.device_here()
        if arguments.device == "auto" and (device.type == "cpu" or torch.cuda.device_count() < RANKS):
            raise UserError("torch sees fewer than two GPUs here, so nothing was run; --device cpu tries the program")
        run = Measuring(arguments, _command(argv or sys.argv[1:]), device)
        print(f"{run.run.machine['gpu']}, seed {arguments.seed}, ceilings {run.run.measured_ceilings}", flush=True)
        _measure(run)
        print("\n".join(table(run.run)))
        run.run.write(arguments.json)
        if arguments.plot is not None:
            write_file("--plot", arguments.plot, _picture(run.run).encode())
    except UserError as error:
        print(f"pair: {error}", file=sys.stderr)
        return 2
    return int(bool(run.run.failures))


def _measure(run: Measuring) -> None:
    a = run.arguments
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        model = Path(folder)
        (model / "config.json").write_text(json.dumps(config_of(run.dims)))
        compiling = pool.submit(compile_ahead, run) if run.device.type == "cuda" else None
        run.attempt("link", lambda: measure_link(run))
        if compiling is not None:
            run.attempt("compiling ahead", compiling.result)
        for names in [[name] for name in a.layouts] if a.one_by_one else [a.layouts]:
            measure_layouts(run, names, model)


def _command(argv: Sequence[str]) -> str:
    """Write the command without the folders of one machine."""
    words = (Path(word).name if "/" in word else word for word in argv)
    return " ".join(["python -m evals.bench_gpu.pair", *words])


def _picture(run: PairRun) -> str:
    of_stages = (one for one in run.timelines if LAYOUTS[one.layout].pp > 1)
    chosen = sorted(of_stages, key=lambda one: (one.part, one.batch, one.layout))
    flying = "three" if any(LAYOUTS[one.layout].ahead for one in chosen) else "two"
    return svg(chosen, run.points, f"Two stages, {flying} plans in flight: {run.shape}, {run.machine['gpu']}")


if __name__ == "__main__":
    sys.exit(main())
