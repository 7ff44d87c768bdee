"""Write lm-eval task files whose paths fit this machine. Standard library only."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from string import Template

EVALS_DIR = Path(__file__).resolve().parent


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
