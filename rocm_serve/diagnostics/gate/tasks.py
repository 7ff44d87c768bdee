"""lm-eval's own gsm8k task with local data, under the name of the task; and the data of the synthetic one."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from rocm_serve.diagnostics.gate.protocol import Task, task_name
from rocm_serve.errors import UserError

DATA_FILES = ("train.jsonl", "test.jsonl")
_CHECKOUT = Path(__file__).resolve().parents[3]
_GENERATOR = "evals.tiny.generator"
_WHERE = {
    "gsm8k": (
        "GSM8K (MIT licence) is not part of this project: take both files from grade_school_math/data of"
        " github.com/openai/grade-school-math"
    ),
    "gsm8k-synth": f"`python -m {_GENERATOR} --out DIR` in a checkout of this project makes them",
}


def task_file(task: Task, lm_eval_tasks: Path, data: Path) -> str:
    """Return the task file for `lm_eval --include_path`. JSON is YAML; all that is not here is upstream's.

    One text for both tasks: shots from train, stops, both filters and what they ignore are those of gsm8k.
    """
    files = {name.partition(".")[0]: str(data.resolve() / name) for name in DATA_FILES}
    fields = {
        "include": str(lm_eval_tasks / "gsm8k" / "gsm8k.yaml"),
        "task": task_name(task),
        "tag": None,
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": files},
    }
    return json.dumps(fields, indent=2) + "\n"


def check_data(task: Task, data: Path) -> tuple[int, dict[str, str]]:
    """Return the number of test questions and the sha256 of both files. Errors: UserError."""
    missing = [name for name in DATA_FILES if not (data / name).is_file()]
    if missing:
        raise UserError(f"--data {data}: no {' and no '.join(missing)}. {_WHERE[task]}, and pass --data DIR")
    hashes = {}
    questions = 0
    for name in DATA_FILES:
        content = (data / name).read_bytes()
        hashes[name] = hashlib.sha256(content).hexdigest()
        lines = content.splitlines()
        questions = len(lines)
        for number, line in enumerate(lines, 1):
            problem = _line_problem(line)
            if problem:
                raise UserError(f"--data {data}: {name}, line {number}: {problem}")
    return questions, hashes


def _line_problem(line: bytes) -> str | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return "this is no JSON"
    if not isinstance(row, dict) or not {"question", "answer"} <= set(row):
        return "a line has 'question' and 'answer'"
    return None


def make_data(task: Task, out: Path, environ: Mapping[str, str]) -> Path:
    """Make the synthetic task's data with the generator of the checkout; return their folder. Errors: UserError."""
    if task != "gsm8k-synth":
        raise UserError(f"--task {task} needs --data DIR. {_WHERE[task]}")
    if not (_CHECKOUT / f"{_GENERATOR.replace('.', '/')}.py").is_file():
        raise UserError(f"this installation has no generator of the synthetic task. {_WHERE[task]}; pass --data DIR")
    command = [sys.executable, "-m", _GENERATOR, "--out", str(out.resolve())]
    made = subprocess.run(
        command, cwd=_CHECKOUT, env=dict(environ), check=False, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    if made.returncode != 0:
        words = made.stderr.decode(errors="replace").strip().splitlines() or ["nothing"]
        raise UserError(f"the generator of the synthetic task ended with exit code {made.returncode}: {words[-1]}")
    return out
