"""Serve a checkpoint, gate it, stop it: the exit code is the gate's.

python evals/gate.py --model DIR --reference FILE [--serve-args "--tp 2 --pp 2"] [more of `rocm-serve gate gsm8k`]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from program import ended
from smoke import served

from rocm_serve.diagnostics.gate.reference import read_reference


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="checkpoint to serve for this run")
    parser.add_argument("--reference", type=Path, required=True, help="reference file of that checkpoint")
    parser.add_argument("--serve-args", default="", help="more flags for `rocm-serve serve`, in one string")
    arguments, more = parser.parse_known_args()
    read_reference(arguments.reference)
    with served(arguments.model, arguments.serve_args) as url:
        command = [sys.executable, "-m", "rocm_serve", "gate", "gsm8k", "--base-url", url]
        command += ["--reference", str(arguments.reference), *more]
        return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(ended("gate", main))
