"""Run detectors over faults: `python -m evals.planted {list,parity,ledger,r7,gate,table} ...`; see --help.

Each result is a line of JSON in --out; a fault that has one for a detector is not run again. `table` makes Markdown of
them. With --clean N a detector is run N times without a fault: every alarm is then a false one.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from evals.planted import detectors
from evals.planted.faults import FAULTS, Fault
from rocm_serve.checkpoint.reader import read_config
from rocm_serve.checkpoint.synthetic import make_checkpoint
from rocm_serve.diagnostics.gate.reference import read_reference
from rocm_serve.diagnostics.gate.tasks import check_data
from rocm_serve.diagnostics.parity.show import sentences
from rocm_serve.errors import UserError
from rocm_serve.models.qwen3_5.spec import parse_config

CLEAN = ({"tp": 1}, {"tp": 2}, {"pp": 2}, {"chunk": 64}, {"tp": 2, "pp": 2})  # of clean runs, in turn
DETECTORS = ("gate", "parity", "ledger", "r7")
Outcome = tuple[bool | None, str]  # seen (None: not decided), and in which words
_RESULT = ("detector", "fault", "seen", "words")  # of a line of --out
VERDICTS = {True: "SEEN", False: "not seen", None: "not decided"}


def run_parity(fault: Fault | None, args: argparse.Namespace, folder: Path) -> Outcome:
    spec = "" if fault is not None else clean_spec(folder)
    found = detectors.parity(fault, model_of(fault, args, folder), _made(folder / "run"), spec=spec)
    words = list(sentences(found))[-1] + (f", {spec}" if spec else "")
    if fault is not None and not found.agree and not detectors.named(fault, found):
        words += f"; NOT NAMED: expected {fault.site}"
    return not found.agree, words


def run_ledger(fault: Fault | None, args: argparse.Namespace, folder: Path) -> Outcome:
    if fault is None:
        return False, "nothing is taken out"
    words = detectors.ledger(fault, args.model, folder)
    return words is not None, words or "not a fault of files"


def run_r7(fault: Fault | None, args: argparse.Namespace, folder: Path) -> Outcome:
    flags = detectors.serve_flags(fault) if fault is not None else clean_flags(folder)
    with detectors.served(fault, model_of(fault, args, folder), flags) as url:
        found = detectors.seeded(url)
    return bool(found), "; ".join(found) or "identical"


def run_gate(fault: Fault | None, args: argparse.Namespace, folder: Path) -> Outcome:
    flags = detectors.serve_flags(fault) if fault is not None else clean_flags(folder)
    if fault is not None and fault.layout:
        return False, "not on the trained checkpoint: it cannot be cut so"
    with detectors.served(fault, args.model, flags) as url:
        reference = read_reference(args.reference)
        if args.data is not None:
            judge = detectors.without_lm_eval(url, reference, args.data)
        else:
            judge = detectors.by_command(url, args.reference, folder / "gate")
        outcome, words = detectors.gate(reference, args.limit, judge)
    return {"fail": True, "pass": False}.get(outcome), f"{outcome}: {words}"


RUN: dict[str, Callable[[Fault | None, argparse.Namespace, Path], Outcome]] = {
    "parity": run_parity,
    "ledger": run_ledger,
    "r7": run_r7,
    "gate": run_gate,
}


def model_of(fault: Fault | None, args: argparse.Namespace, folder: Path) -> Path:
    """Return the checkpoint that the fault is run on: the given one, or a made-up one of the layout that it needs."""
    if fault is None or not fault.layout:
        return Path(args.model)
    return make_checkpoint(folder / fault.layout, fault.layout, "bf16", seed=3)


def clean_of(folder: Path) -> dict[str, int]:
    """Return the topology of a clean run, whose number its folder's name ends in."""
    return CLEAN[int(folder.name.rpartition("-")[2]) % len(CLEAN)]


def clean_spec(folder: Path) -> str:
    return ",".join(["dtype=float32", *(f"{key}={value}" for key, value in clean_of(folder).items())])


def clean_flags(folder: Path) -> list[str]:
    return detectors.flags_of(clean_of(folder))


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def check(detector: str, args: argparse.Namespace) -> None:
    """Refuse what would look like a fault that was seen, or be missed at the end of a run. Errors: UserError."""
    detectors.chosen(args.fault)
    for flag, value, least in (("--clean", args.clean, 0), ("--limit", args.limit, 1)):
        if value < least:
            raise UserError(f"{flag} {value}: legal: {least} or more")
    parse_config(*read_config(args.model))
    if not args.out.resolve().parent.is_dir():
        raise UserError(f"--out {args.out}: there is no folder {args.out.resolve().parent}")
    results(args.out)
    if detector != "gate":
        return
    if args.reference is None:
        raise UserError("the gate needs --reference FILE")
    task = read_reference(args.reference).header.protocol.task
    if args.data is not None:
        check_data(task, args.data)


def detect(detector: str, args: argparse.Namespace) -> None:
    """Run one detector over the chosen faults, or over none several times."""
    there = {(line["detector"], line["fault"]) for line in results(args.out)}
    wanted = [None] * args.clean if args.clean else detectors.chosen(args.fault)
    for number, fault in enumerate(wanted):
        name = f"clean {number}" if fault is None else fault.name
        if (detector, name) in there:
            continue
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="planted-", suffix=f"-{number}") as folder:
            try:
                seen, words = RUN[detector](fault, args, Path(folder))
            except UserError as error:
                seen, words = None, f"does not run: {error}"  # counts for no detector: no server answered
        line = {"detector": detector, "fault": name, "seen": seen, "words": words}
        print(f"{detector}, {name}: {VERDICTS[seen]} ({words}), {time.monotonic() - began:.0f} s")
        with args.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def results(path: Path) -> list[dict[str, Any]]:
    """Read an earlier run's lines; none where there is no such file. Errors: UserError."""
    if not path.exists():
        return []
    try:
        found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return [{name: line[name] for name in _RESULT} for line in found]
    except OSError as error:
        raise UserError(f"--out {path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"--out {path} does not hold results, a line each: {error}") from None


def table(found: list[dict[str, Any]]) -> str:
    """Make Markdown of results: a row a fault, a column a detector, then what is said of clean runs."""
    by_both = {(line["detector"], line["fault"]): line for line in found}
    seen = {both: line["seen"] for both, line in by_both.items()}
    words = {line["fault"]: _place(line["words"]) for line in found if line["detector"] == "parity"}
    rows = ["| fault | " + " | ".join(DETECTORS) + " | what parity says first |", "|" + "---|" * (len(DETECTORS) + 2)]
    for fault in FAULTS.values():
        marks = [_mark(by_both.get((name, fault.name))) for name in DETECTORS]
        rows.append(f"| {fault.words} | " + " | ".join(marks) + f" | {words.get(fault.name, '')} |")
    for name in DETECTORS:
        clean = [alarm for (detector, fault), alarm in seen.items() if detector == name and fault.startswith("clean")]
        rows.append(f"\n{name}: {sum(map(bool, clean))} alarms in {len(clean)} clean runs.")
    return "\n".join(rows)


def _mark(line: dict[str, Any] | None) -> str:
    """Say what a detector saw; one that was stopped before it could decide has `seen` null and says how far it came."""
    if line is None:
        return "not run"
    return {True: "seen", False: "no"}.get(line["seen"], line["words"])


def _place(words: str) -> str:
    """Keep layer, op, site and ranks of parity's sentence."""
    return re.sub(r"^differ: |, prompt \d+, position.*$", "", words)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("list", "table", *RUN))
    parser.add_argument("--model", type=Path, default=Path("evals/tiny/checkpoint"))
    parser.add_argument("--fault", help="one fault; else all")
    parser.add_argument("--clean", type=int, default=0, help="runs without a fault, instead")
    parser.add_argument("--out", type=Path, default=Path("planted.jsonl"), help="results, a line each")
    parser.add_argument("--reference", type=Path, help="of the gate")
    parser.add_argument("--data", type=Path, help="its questions, where lm-eval is not to ask: see evals/plain_gate.py")
    parser.add_argument("--limit", type=int, default=200, help="questions of the gate")
    args = parser.parse_args()
    if args.what == "list":
        for fault in FAULTS.values():
            print(f"{fault.name}: {fault.words} ({fault.source}); parity --a {fault.spec}: {fault.site}")
        return 0
    try:
        if args.what == "table":
            print(table(results(args.out)))
            return 0
        check(args.what, args)
    except UserError as error:
        parser.error(str(error))
    detect(args.what, args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
