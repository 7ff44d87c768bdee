"""python -m evals.gfx compile | emulate | table | record: see the package's words.

Exit 0: all is well. 1: a kernel or a table is not as it should be. 2: a program is missing.
"""

from __future__ import annotations

import argparse
import multiprocessing
import secrets
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from fnmatch import fnmatchcase
from functools import partial

from evals.gfx import records
from evals.gfx.evidence import page
from evals.gfx.judge import Verdict
from evals.gfx.kernels import NOT_EMULATED, TRIALS
from evals.gfx.registry import ARCHS, Trial
from evals.gfx.runs import run_arch
from evals.gfx.toolchain import ToolError, need_programs


def _run(arguments: argparse.Namespace, *, execute: bool) -> tuple[list[Verdict], dict[str, Trial]]:
    need_programs()
    trials = {trial.name: trial for trial in TRIALS}
    if len(trials) != len(TRIALS):
        raise SystemExit("evals.gfx: two trials have one name: op, provider and case must differ")
    names = [name for name in trials if arguments.only in name]
    if not names:
        raise ToolError(f"--only {arguments.only}: no trial has that in its name")
    seed = secrets.randbits(32) if arguments.seed is None else arguments.seed
    print(f"{len(names)} trials, seed {seed}", flush=True)
    run = partial(run_arch, names=names, execute=execute, seed=seed)
    # The emulator is Python on one core: an architecture each.
    with ProcessPoolExecutor(arguments.jobs, multiprocessing.get_context("spawn")) as pool:
        return [verdict for verdicts in pool.map(run, ARCHS) for verdict in verdicts], trials


def _failed(verdicts: Sequence[Verdict]) -> int:
    bad = [v for v in verdicts if v.faults]
    for v in bad:
        print(f"FAILED {v.arch} {v.trial}: {'; '.join(v.faults)}")
    print(f"{len(verdicts) - len(bad)} of {len(verdicts)} ok")
    return 1 if bad or not verdicts else 0


def compile_all(arguments: argparse.Namespace) -> int:
    """Compile and check; compare with the committed table, or write it."""
    verdicts, trials = _run(arguments, execute=False)
    found = records.resource_table(verdicts, trials)
    print("\n".join(records.resource_lines(found)))
    code = _failed(verdicts)
    committed, tools = records.read(records.RESOURCES), records.toolchain()
    if arguments.write:
        kept = committed.get("kernels", {}) if arguments.only else {}
        records.write(records.RESOURCES, {"toolchain": tools, "kernels": records.merged(kept, found)})
        return code
    different = records.resource_differences(found, committed.get("kernels", {}))
    for line in different:
        print(f"resources: {line}")
    if different and committed.get("toolchain") != tools:
        print(f"resources: these are {tools}, the committed numbers are {committed.get('toolchain')}: not judged")
        return code
    if different:
        print("resources: python -m evals.gfx compile --write, if the change is meant")
    return 1 if different else code


def emulate_all(arguments: argparse.Namespace) -> int:
    """Execute; every kernel must have been executed, or be listed."""
    started = time.monotonic()
    verdicts, trials = _run(arguments, execute=True)
    code = _failed(verdicts)
    table = records.emulated_table(verdicts, trials)
    if arguments.write:
        kept = records.read(records.EMULATED) if arguments.only else {}
        records.write(records.EMULATED, records.merged(kept, table))
    missing = [] if arguments.only else records.missing_levels(TRIALS, NOT_EMULATED, table)
    for line in missing:
        print(f"levels: {line}")
    print(f"{time.monotonic() - started:.0f} s")
    return 1 if missing else code


def table(arguments: argparse.Namespace) -> int:
    """Compare docs/evidence.md with what the committed tables say, or write it."""
    made = page(TRIALS, NOT_EMULATED)
    if arguments.write:
        records.EVIDENCE.write_text(made, encoding="utf-8")
        return 0
    if not records.EVIDENCE.exists() or records.EVIDENCE.read_text(encoding="utf-8") != made:
        print("docs/evidence.md is not what the tables say: python -m evals.gfx table --write")
        return 1
    return 0


def record(arguments: argparse.Namespace) -> int:
    """Record by hand that kernels were run: record cuda "H200, 2026-11-30" "hip *" "triton rms*"."""
    kernels = records.every_kernel(TRIALS, NOT_EMULATED)
    found = [kernel for kernel in kernels if any(fnmatchcase(kernel, pattern) for pattern in arguments.kernels)]
    if not found:
        print(f"record: {arguments.kernels} matches none of {', '.join(kernels)}", file=sys.stderr)
        return 2
    levels = records.read(records.LEVELS)
    levels.setdefault(arguments.level, {}).update(dict.fromkeys(found, arguments.said))
    records.write(records.LEVELS, levels)
    return table(argparse.Namespace(write=True))


def main(argv: Sequence[str] | None = None) -> int:
    """Run one of the three."""
    parser = argparse.ArgumentParser(prog="python -m evals.gfx", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, function in (("compile", compile_all), ("emulate", emulate_all), ("table", table)):
        command = commands.add_parser(name, help=(function.__doc__ or "").splitlines()[0])
        command.set_defaults(function=function)
        command.add_argument("--write", action="store_true", help="write the committed table")
        if name != "table":
            command.add_argument("--only", default="", help="trials whose name contains this")
            command.add_argument("--seed", type=int, help="of the random inputs; a fresh one by default")
            command.add_argument("--jobs", type=int, default=2, help="processes: an architecture each")
    command = commands.add_parser("record", help="record by hand that kernels were run on a GPU")
    command.set_defaults(function=record)
    command.add_argument("level", choices=["interpreted", "cuda", "rocm"])
    command.add_argument("said", help="on what and when, in few words: they are the cell of docs/evidence.md")
    command.add_argument("kernels", nargs="+", help='patterns of "provider kernel"')
    arguments = parser.parse_args(argv)
    try:
        return int(arguments.function(arguments))
    except ToolError as error:
        print(f"evals.gfx: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
