"""`make test-gpu`: the tests that need a GPU, then a short serve, then one file to send back.

    python -m tests.gpu_report --out gpu-report.json

Exits with 0 when everything that could be seen is well, with 1 when something failed or no GPU was seen. The file is
written in every case. The Python that runs this must be the one that holds the GPU's torch.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from rocm_serve.checkpoint.synthetic import make_checkpoint
from rocm_serve.diagnostics.record import Redactor, versions
from rocm_serve.platform.facts import GpuFacts
from rocm_serve.platform.probe import gpus_seen_by_torch
from tests.e2e.harness import ROOT, Server

PROMPT = "The quick brown fox"
TOKENS = 64
TAIL = 6000  # characters of output that a failure is reported with
MARKS = "gpu or cuda or rocm"
_MARKED = re.compile(r"\bpytest\.mark\.(gpu|cuda|rocm)\b")


def run_tests(work: Path) -> dict[str, Any]:
    """Run the marked tests in a process of their own; return every test's outcome and seconds."""
    junit = work / "junit.xml"
    # Named one by one: others import tools of development that an image does not hold.
    files = [p for p in sorted(ROOT.glob("tests/**/test_*.py")) if _MARKED.search(p.read_text(encoding="utf-8"))]
    options = ("-m", MARKS, "-q", f"--junitxml={junit}", "-p", "no:cacheprovider")
    command = [sys.executable, "-m", "pytest", *options, *map(str, files)]
    started = time.monotonic()
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    found = {
        "exit_code": run.returncode,
        "seconds": round(time.monotonic() - started, 1),
        "tests": read_junit(junit) if junit.exists() else [],
    }
    if run.returncode:
        found["output"] = (run.stdout + run.stderr)[-TAIL:]
    return found


def read_junit(junit: Path) -> list[dict[str, Any]]:
    """List name, outcome, seconds and, unless it passed, why."""
    tests = []
    for case in ET.parse(junit).getroot().iter("testcase"):
        outcome, why = "passed", ""
        for word in ("failure", "error", "skipped"):
            if (node := case.find(word)) is not None:
                outcome, why = word, (node.get("message") or "")[:400]
        name = f"{case.get('classname')}::{case.get('name')}"
        tests.append({"name": name, "outcome": outcome, "seconds": round(float(case.get("time") or 0), 3)})
        if why:
            tests[-1]["why"] = why
    return tests


def smoke(checkpoint: Path, work: Path, tp: int, pp: int) -> dict[str, Any]:
    """Serve, ask twice for the same greedy tokens, end; return timings and what the server said of itself."""
    found: dict[str, Any] = {"tp": tp, "pp": pp}
    flags = ("--tp", str(tp), "--pp", str(pp), "--max-model-len", "1024", "--mem-fraction", "0.3")
    started = time.monotonic()
    try:
        with Server(checkpoint, work / f"tp{tp}-pp{pp}", flags) as server:
            found["ready_seconds"] = round(time.monotonic() - started, 2)
            found["ready_line"] = server.ready_line.strip()
            answers = []
            for _ in range(2):
                began = time.monotonic()
                answer = server.complete(prompt=PROMPT, max_tokens=TOKENS, temperature=0, ignore_eos=True)
                found["tokens_per_second"] = round(TOKENS / (time.monotonic() - began), 1)
                answers.append(answer["choices"][0]["text"])
            found["same_twice"] = answers[0] == answers[1]
            found["completion_tokens"] = answer["usage"]["completion_tokens"]
            found["said"] = [line for line in server.log.splitlines() if "planned" in line or "machine:" in line]
        ok = found["same_twice"] and found["completion_tokens"] == TOKENS
        found["outcome"] = "passed" if ok else "failure"
    except AssertionError as error:
        found |= {"outcome": "failure", "output": str(error)[-TAIL:]}
    return found


def topologies(num_gpus: int) -> list[tuple[int, int]]:
    """One GPU, then two by tensor and by pipeline parallelism, then four both ways, as far as there are GPUs."""
    return [(tp, pp) for tp, pp in ((1, 1), (2, 1), (1, 2), (2, 2)) if tp * pp <= num_gpus]


def make_report(gpu: GpuFacts, say: Callable[[str], None]) -> dict[str, Any]:
    """Run everything that `gpu` allows."""
    report: dict[str, Any] = {"gpu": msgspec.to_builtins(gpu), "versions": versions(), "tests": None, "serve": []}
    if gpu.kind == "none":
        report["sentence"] = (
            f"test-gpu: torch {gpu.torch_build} sees no GPU on this machine, so nothing was run: no op, no executor,"
            " no collective and no serve could be judged"
        )
        return report | {"ok": False}
    with tempfile.TemporaryDirectory(prefix="gpu-report-") as folder:
        work = Path(folder)
        say(f"test-gpu: {gpu.num_gpus} x {gpu.name} ({gpu.arch}), torch {gpu.torch_build}; tests marked {MARKS}")
        report["tests"] = run_tests(work)
        checkpoint = make_checkpoint(work / "tiny", "text-fp8", "bf16")
        for tp, pp in topologies(gpu.num_gpus):
            say(f"test-gpu: serve with tp {tp} x pp {pp}")
            report["serve"].append(smoke(checkpoint, work, tp, pp))
    outcomes = Counter(test["outcome"] for test in report["tests"]["tests"])
    served = Counter(one["outcome"] for one in report["serve"])
    report["ok"] = report["tests"]["exit_code"] == 0 and set(served) == {"passed"}
    report["sentence"] = f"test-gpu: tests {dict(outcomes)}, serves {dict(served)}" + (
        "" if report["ok"] else ": something failed, see the file"
    )
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu-report.json"))
    out = parser.parse_args().out
    report = make_report(gpus_seen_by_torch(), lambda line: print(line, flush=True))
    out.write_text(json.dumps(Redactor({}).json(report), indent=1) + "\n", encoding="utf-8")
    print(f"{report['sentence']}\n{out}")
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
