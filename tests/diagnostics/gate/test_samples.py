"""lm-eval's sample files: what is read, and what is wrong with one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rocm_serve.diagnostics.gate.samples import read_samples
from tests.diagnostics.gate.made import PROTOCOL


def lines(count: int) -> list[dict[str, Any]]:
    return [
        {
            "doc_id": i,
            "doc": {"question": f"q{i}", "answer": "#### 1"},
            "target": "#### 1",
            "arguments": {"gen_args_0": {"arg_0": "the prompt", "arg_1": PROTOCOL.generation()}},
            "resps": [[" the answer"]],
            "filtered_resps": ["1"],
            "filter": name,
            "metrics": ["exact_match"],
            "doc_hash": "d",
            "prompt_hash": "p",
            "target_hash": "t",
            "exact_match": float(name == "strict-match"),
        }
        for name in ("strict-match", "flexible-extract")
        for i in range(count)
    ]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_both_filters_of_a_question_become_one_sample(tmp_path: Path) -> None:
    found, problems = read_samples(write(tmp_path / "s", lines(3)))
    assert problems == [] and [one.doc_id for one in found] == [0, 1, 2]
    assert found[1].verdicts == {"strict-match": True, "flexible-extract": False}
    assert (found[1].question, found[1].answer, found[1].target) == ("q1", " the answer", "#### 1")
    assert found[1].generation == PROTOCOL.generation()


def test_a_question_that_is_there_twice_is_named(tmp_path: Path) -> None:
    rows = lines(3)
    assert read_samples(write(tmp_path / "s", [*rows, rows[4]]))[1] == [
        "question 1 is there twice under flexible-extract"
    ]


def test_a_filter_that_is_missing_is_named(tmp_path: Path) -> None:
    found, problems = read_samples(write(tmp_path / "s", lines(3)[:-1]))
    assert [one.doc_id for one in found] == [0, 1]
    assert problems == ["question 2 was judged by strict-match, not by strict-match, flexible-extract"]


def test_a_line_that_is_no_sample_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "s", lines(1))
    path.write_text(path.read_text() + '{"doc_id": 7}\n')
    (problem,) = read_samples(path)[1]
    assert problem.startswith("s, line 3:")
