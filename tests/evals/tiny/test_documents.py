"""Prompts as lm-eval writes them, and rows of ids that hold whole documents."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from evals.tiny.documents import (
    CHAT_OPENING,
    END,
    QUESTION_WEIGHT,
    SEPARATOR,
    chat_prompt,
    document,
    few_shot_prompt,
    rows,
    shots_of_lm_eval,
)
from evals.tiny.generator import pool
from evals.tiny.shape import DIMS
from evals.tiny.tokenizer import learn
from rocm_serve.tokens.template import ChatTemplate

CHECKPOINT = Path(__file__).parents[3] / "evals" / "tiny" / "checkpoint"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))


def test_a_prompt_is_lm_eval_s() -> None:
    """doc_to_text `Question: {{question}}\\nAnswer:`, a space before targets, an empty line between examples."""
    one, two = pool("train", 2)
    expected = f"Question: {one.question}\nAnswer: {one.answer}\n\nQuestion: {two.question}\nAnswer:"
    assert few_shot_prompt([one], two.question) == expected


def test_the_shots_are_those_that_lm_eval_draws() -> None:
    """Of GSM8K's 7473 examples lm-eval's logs show: Jen and Tyler, the law firm, the grill, the bear, Brendan."""
    assert shots_of_lm_eval(5, 2, 7473)[0] == [6374, 3610, 957, 61, 742]


def test_prompts_and_answers_are_encoded_apart_as_together(tokenizer: Tokenizer) -> None:
    shots = pool("train", 50)
    for i, problem in enumerate(pool("test", 60)):
        prompt = few_shot_prompt(shots[i % 45 : i % 45 + 5], problem.question)
        answer = f" {problem.answer}{SEPARATOR}"
        assert tokenizer.encode(prompt).ids + tokenizer.encode(answer).ids == tokenizer.encode(prompt + answer).ids
        assert len(tokenizer.encode(prompt).ids) < 900


def test_a_chat_is_what_the_template_writes() -> None:
    template = (CHECKPOINT / "chat_template.jinja").read_text(encoding="utf-8")
    made = ChatTemplate(template, {}).render([{"role": "user", "content": "How many?"}])
    assert chat_prompt("How many?") == made


def test_rows_begin_with_a_document_and_depend_on_the_seed_alone(tokenizer: Tokenizer) -> None:
    made = rows("seed", tokenizer, 512, 12)
    assert made.ids.shape == made.weights.shape == (12, 512)
    again = rows("seed", tokenizer, 512, 12)
    assert np.array_equal(made.ids, again.ids) and np.array_equal(made.weights, again.weights)
    assert not np.array_equal(made.ids, rows("other", tokenizer, 512, 12).ids)
    for ids, weights in zip(made.ids, made.weights, strict=True):
        text = tokenizer.decode(ids.tolist(), skip_special_tokens=False)
        assert text.startswith(("Question: ", CHAT_OPENING))
        learnt = tokenizer.decode(ids[weights == 1].tolist(), skip_special_tokens=False)
        assert "Question" not in learnt and ("####" in learnt or "</think>" in learnt)
        assert set(weights.tolist()) <= {1.0, np.float16(QUESTION_WEIGHT)}


def test_a_document_has_one_world_and_one_end() -> None:
    for seed in range(30):
        parts = list(document(random.Random(seed)))
        assert [answer.endswith((END, "<|im_end|>")) for _, answer in parts] == [False] * (len(parts) - 1) + [True]
        assert all(answer.endswith(SEPARATOR) for _, answer in parts[:-1])


@pytest.mark.slow  # twenty seconds of merging on a busy core
def test_the_committed_tokenizer_is_what_the_recipe_learns(tmp_path: Path) -> None:
    learn(tmp_path, DIMS.vocabulary, DIMS.max_position)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / name).read_bytes() == (CHECKPOINT / name).read_bytes(), name
