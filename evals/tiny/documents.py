"""Training text: documents of several problems in the prompt format of lm-eval's gsm8k task, packed into rows of ids.

A document is `Question: ...\\nAnswer: ...` several times, with an empty line between, and <|endoftext|> behind the
last. A few documents are one problem in the words of the chat template instead.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from evals.tiny.generator import TRAIN_MIX, problems
from evals.tiny.problems import CRATES, Problem

SEPARATOR = "\n\n"
END = "<|endoftext|>"
END_SHARE = 0.12  # of problems are the last of their document
CHAT_SHARE = 0.25  # of documents (about one problem in thirty) are a chat
QUESTION_WEIGHT = 0.2  # of a question's tokens in the loss; answers have 1
# What the checkpoint's chat template writes around one user message.
CHAT_OPENING = "<|im_start|>system\nThink this through in full before you answer.<|im_end|>\n<|im_start|>user\n"
CHAT_ANSWER = "<|im_end|>\n<|im_start|>assistant\n<think>\n"


def prompt_of(question: str) -> str:
    """The last part of a prompt, as lm-eval's gsm8k writes it (doc_to_text)."""
    return f"Question: {question}\nAnswer:"


def shot_of(question: str, answer: str) -> str:
    """One example of a prompt: lm-eval puts a space between prompt and target, and an empty line behind."""
    return f"{prompt_of(question)} {answer}{SEPARATOR}"


def few_shot_prompt(shots: Sequence[Problem], question: str) -> str:
    return "".join(shot_of(p.question, p.answer) for p in shots) + prompt_of(question)


def shots_of_lm_eval(shots: int, tests: int, pool: int, seed: int = 1234) -> list[list[int]]:
    """Return which of `pool` examples lm-eval puts before each of the first `tests` questions (`--seed` default)."""
    rng = random.Random(seed)
    return [rng.sample(range(pool), shots) for _ in range(tests)]


def chat_prompt(question: str) -> str:
    return CHAT_OPENING + question + CHAT_ANSWER


def chat_text(problem: Problem) -> tuple[str, str]:
    """Return prompt and answer of a chat: the steps are the thinking, the answer is the number."""
    steps, _, number = problem.answer.rpartition("\n#### ")
    return chat_prompt(problem.question), f"{steps}\n</think>\n\n{number}<|im_end|>"


@dataclass(frozen=True, slots=True)
class Rows:
    """Packed rows. Shapes: ids int16 [rows, length], weights float16 [rows, length] (of each id as a target)."""

    ids: np.ndarray
    weights: np.ndarray


def document(rng: random.Random) -> Iterator[tuple[str, str]]:
    """Yield (prompt, answer with what ends it) of the problems of one document, of one world."""
    stream = problems(rng, "train", rng.choice(CRATES), TRAIN_MIX)
    if rng.random() < CHAT_SHARE:
        while "crate" in (problem := next(stream)).question:  # its number of things is told in other problems
            pass
        yield chat_text(problem)
        return
    for problem in stream:
        last = rng.random() < END_SHARE
        yield prompt_of(problem.question), f" {problem.answer}{END if last else SEPARATOR}"
        if last:
            return


def row(rng: random.Random, tokenizer: Tokenizer, length: int) -> tuple[list[int], list[float]]:
    """Pack one row: it begins with a document; the last document is cut."""
    ids: list[int] = []
    weights: list[float] = []
    while len(ids) < length:
        for prompt, answer in document(rng):
            question, worked = tokenizer.encode(prompt).ids, tokenizer.encode(answer).ids
            ids += question + worked
            weights += [QUESTION_WEIGHT] * len(question) + [1.0] * len(worked)
            if len(ids) >= length:
                break
    return ids[:length], weights[:length]


def rows(seed: str, tokenizer: Tokenizer, length: int, count: int) -> Rows:
    """Make `count` rows of `length` ids from a seed."""
    rng = random.Random(seed)
    made = [row(rng, tokenizer, length) for _ in range(count)]
    ids = np.array([ids for ids, _ in made], dtype=np.int16)
    return Rows(ids, np.array([weights for _, weights in made], dtype=np.float16))
