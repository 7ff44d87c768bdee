"""Write lm-eval task files whose paths fit this machine. Standard library only."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from string import Template

EVALS_DIR = Path(__file__).resolve().parent
GSM8K_FILES = ("train.jsonl", "test.jsonl")


def gsm8k_problem(data: Path) -> str | None:
    """Say in one sentence what is wrong with a GSM8K folder, or None."""
    missing = [name for name in GSM8K_FILES if not (data / name).is_file()]
    if missing:
        return (
            f"{data}: no {' and no '.join(missing)}. GSM8K (MIT licence) is not part of this project: take both files"
            " from grade_school_math/data of github.com/openai/grade-school-math and pass --data DIR"
            " (make: GSM8K_DIR=DIR)"
        )
    with (data / GSM8K_FILES[1]).open(encoding="utf-8") as lines:
        first = json.loads(next(lines, "{}"))
    if not {"question", "answer"} <= set(first):
        return f"{data / GSM8K_FILES[1]}: its lines have no 'question' and 'answer'"
    return None


def lm_eval_tasks() -> Path:
    """Find the folder of the installed lm-eval's task files, without importing lm-eval."""
    spec = importlib.util.find_spec("lm_eval")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("lm-eval is not installed here: pip install -e '.[cpu,eval]' (make eval-smoke does it)")
    return Path(spec.submodule_search_locations[0]) / "tasks"


def write_tasks(names: list[str], out: Path, gsm8k_data: Path | None) -> None:
    """Fill in evals/NAME.yaml for each name and write it to `out`, for `lm_eval --include_path`."""
    values = {"EVALS_DIR": str(EVALS_DIR), "LM_EVAL_TASKS": str(lm_eval_tasks())}
    if gsm8k_data is not None:
        values["GSM8K_DIR"] = str(gsm8k_data.resolve())
    for name in names:
        template = Template((EVALS_DIR / f"{name}.yaml").read_text(encoding="utf-8"))
        text = template.substitute(values)
        (out / f"{name}.yaml").write_text(text, encoding="utf-8")
