"""Task files and data."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from string import Template

import pytest
import yaml

from rocm_serve.config import load
from rocm_serve.diagnostics.gate.tasks import check_data, make_data, task_file
from rocm_serve.errors import UserError
from tests.diagnostics.gate.oracle import write_data

EVALS = Path(__file__).parents[3] / "evals"


@pytest.mark.parametrize("task", ["gsm8k", "gsm8k-synth"])
def test_the_gates_task_is_the_one_written_down_in_evals(tmp_path: Path, task: str) -> None:
    written = Template((EVALS / f"{task.replace('-', '_')}.yaml").read_text(encoding="utf-8")).substitute(
        LM_EVAL_TASKS="/lm-eval/tasks", GSM8K_DIR=str(tmp_path.resolve())
    )
    assert yaml.safe_load(task_file(task, Path("/lm-eval/tasks"), tmp_path)) == yaml.safe_load(written)  # type: ignore[arg-type]


def test_data_are_counted_and_hashed(tmp_path: Path) -> None:
    count, hashes = check_data("gsm8k", write_data(tmp_path, 7))
    assert count == 7
    assert hashes["test.jsonl"] == hashlib.sha256((tmp_path / "test.jsonl").read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("line", "why"), [("{}", "has 'question' and 'answer'"), ("x", "no JSON"), ("3", "a line has")]
)
def test_a_line_that_is_no_question_is_named(tmp_path: Path, line: str, why: str) -> None:
    write_data(tmp_path, 2)
    with (tmp_path / "test.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(UserError, match=rf"test.jsonl, line 3: .*{why}"):
        check_data("gsm8k", tmp_path)


def test_absent_data_are_named_with_where_to_get_them(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no train.jsonl and no test.jsonl.*grade-school-math"):
        check_data("gsm8k", tmp_path)
    with pytest.raises(UserError, match=r"evals.tiny.generator --out DIR"):
        check_data("gsm8k-synth", tmp_path)
    with pytest.raises(UserError, match="--task gsm8k needs --data DIR"):
        make_data("gsm8k", tmp_path, {})


def test_the_synthetic_data_are_made_by_the_generator(tmp_path: Path) -> None:
    out = make_data("gsm8k-synth", tmp_path / "made", load.environment())
    assert check_data("gsm8k-synth", out)[0] == 1319
    first = json.loads((out / "test.jsonl").read_text(encoding="utf-8").splitlines()[0])
    assert "#### " in first["answer"]
