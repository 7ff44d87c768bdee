"""The independent answers: nothing of the server in them, the same prompts, weights and verdicts."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

from evals.references import hf_reference
from evals.tiny import hf_answers
from evals.tiny.documents import few_shot_prompt, shots_of_lm_eval
from evals.tiny.export import read, values
from evals.tiny.generator import POOL_SHOTS, pool, write_pool
from tests.evals.tiny.test_evaluate import VERDICTS

CHECKPOINT = Path(__file__).parents[3] / "evals" / "tiny" / "checkpoint"


def test_it_imports_nothing_of_the_server_or_of_the_training() -> None:
    nodes = list(ast.walk(ast.parse(Path(hf_answers.__file__).read_text(encoding="utf-8"))))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    assert not [name for name in names if name.startswith(("rocm_serve", "evals", "tests"))]


def test_it_asks_what_the_training_asked(tmp_path: Path) -> None:
    write_pool(tmp_path)
    shots, tests = pool("train", POOL_SHOTS), pool("test", 5)
    expected = [
        (few_shot_prompt([shots[i] for i in those], p.question), p.answer)
        for those, p in zip(shots_of_lm_eval(5, 5, POOL_SHOTS), tests, strict=True)
    ]
    items = hf_reference.items_of(tmp_path, 5, 5)
    assert [(item.prompt, item.doc["answer"]) for item in items] == expected


def test_it_reads_the_weights_that_the_export_wrote() -> None:
    ours = {name: value for name, value in values(read(CHECKPOINT)).items() if not name.startswith("mtp.")}
    theirs = hf_answers.weights(CHECKPOINT, 8)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


@pytest.mark.parametrize(("text", "strict", "flexible"), VERDICTS)
def test_verdicts(text: str, strict: bool, flexible: bool) -> None:
    assert hf_answers.verdicts(text, "It is <<2*6=12>>12.\n#### 12") == {"strict": strict, "flexible": flexible}
