"""The judgement without lm-eval: answers right as the reference's pass, lost ones fail, other prompts are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from evals import plain_gate
from evals.references.hf_reference import Item, items_of
from evals.tiny.generator import write_pool
from rocm_serve.diagnostics.gate.reference import Reference, read_reference
from rocm_serve.errors import UserError

ROOT = Path(__file__).parents[2]
QUESTIONS = 60


@pytest.fixture(scope="module")
def reference() -> Reference:
    return read_reference(ROOT / "evals" / "references" / "tiny-gsm8k-synth.jsonl")


@pytest.fixture(scope="module")
def items(tmp_path_factory: pytest.TempPathFactory) -> list[Item]:
    data = tmp_path_factory.mktemp("data")
    write_pool(data)
    return items_of(data, 5, QUESTIONS)


def test_the_references_own_answers_pass(items: list[Item], reference: Reference) -> None:
    plain_gate.check_prompts(items, reference)
    found = plain_gate.judge(items, [reference.questions[item.doc_id].answer for item in items], reference)
    assert found["outcome"] == "pass" and found["same_text"] == QUESTIONS
    assert not found["lost"] and not found["gained"] and found["p"] == 1.0
    assert found["right"] == sum(reference.questions[i].verdicts["strict-match"] for i in range(QUESTIONS))


def test_lost_answers_fail_and_are_named(items: list[Item], reference: Reference) -> None:
    texts = [reference.questions[item.doc_id].answer for item in items]
    right = [i for i in range(QUESTIONS) if reference.questions[i].verdicts["strict-match"]]
    for i in right[:8]:
        texts[i] = "I do not know."
    found = plain_gate.judge(items, texts, reference)
    assert found["outcome"] == "fail" and found["lost"] == right[:8] and found["p"] == pytest.approx(2**-8)


def test_other_prompts_are_refused(items: list[Item], reference: Reference) -> None:
    with pytest.raises(UserError, match="question 0: its prompt"):
        plain_gate.check_prompts([replace(items[0], prompt=items[0].prompt + " ")], reference)
