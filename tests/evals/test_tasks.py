"""The task files of evals/ and what is said when their data are absent. lm_eval itself is run by `make eval-smoke`."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from string import Template
from types import ModuleType

import pytest

EVALS = Path(__file__).parents[2] / "evals"


@pytest.fixture(scope="module")
def tasks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("evals_tasks", EVALS / "tasks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_written_tasks_hold_this_machines_paths_and_no_placeholder(
    tasks: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "lm_eval_tasks", lambda: Path("/lm-eval/tasks"))
    tasks.write_tasks(["gsm8k", "weekday_order"], tmp_path, tmp_path / "data")
    gsm8k = (tmp_path / "gsm8k.yaml").read_text()
    assert "include: /lm-eval/tasks/gsm8k/gsm8k.yaml" in gsm8k
    assert f"test: {tmp_path.resolve()}/data/test.jsonl" in gsm8k
    assert f"test: {EVALS}/weekday_order.jsonl" in (tmp_path / "weekday_order.yaml").read_text()
    for path in tmp_path.glob("*.yaml"):
        assert Template(path.read_text()).get_identifiers() == []


def test_every_question_of_weekday_order_has_one_right_choice_of_three() -> None:
    rows = [json.loads(line) for line in (EVALS / "weekday_order.jsonl").read_text().splitlines()]
    assert len(rows) == 10
    for row in rows:
        assert set(row) == {"question", "choices", "answer"}
        assert len(set(row["choices"])) == 3 and 0 <= row["answer"] < 3
        assert all(choice.startswith(" ") for choice in row["choices"]), "the space belongs to the continuation"
