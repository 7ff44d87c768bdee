"""The word problems: answers that compute, splits that share no numbers, the same bytes from the same seed."""

from __future__ import annotations

import ast
import itertools
import json
import operator
import random
import re
from collections import Counter
from fractions import Fraction
from pathlib import Path

import pytest

from evals.tiny.generator import POOL_CRATE, POOL_SHOTS, POOL_TESTS, TRAIN_MIX, pool, problems, write_pool
from evals.tiny.problems import CRATES, LARGEST, Draw, Impossible, Problem, Template, calculate, render
from evals.tiny.templates import CRATE_TEMPLATES, TEMPLATES

HASHES = {
    "train.jsonl": "045d95b342fc79209ad87afc14d2c9115bc6915fed91a17667ed7872e6eaa8b2",
    "test.jsonl": "22b1547c50f23b6a37981a67296243117fabc960d5673c5a1653d3e9f3a2d969",
}
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
STEP = re.compile(r"<<([^=]+)=(\d+)>>(\d+)")


def value_of(node: ast.expr) -> Fraction:
    """Evaluate by Python's own grammar: the generator has an evaluator of its own."""
    if isinstance(node, ast.BinOp):
        return OPERATORS[type(node.op)](value_of(node.left), value_of(node.right))
    assert isinstance(node, ast.Constant) and isinstance(node.value, int)
    return Fraction(node.value)


def take(split: str, count: int, crate: int = POOL_CRATE, seed: int = 3) -> list[Problem]:
    return list(itertools.islice(problems(random.Random(seed), split, crate, TRAIN_MIX), count))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def some() -> list[Problem]:
    return [p for crate in (7, 24) for p in take("train", 2000, crate, seed=crate)]


def test_every_calculation_is_right_and_the_last_is_the_answer(some: list[Problem]) -> None:
    for problem in some:
        steps = STEP.findall(problem.answer)
        for expression, result, shown in steps:
            assert value_of(ast.parse(expression, mode="eval").body) == int(result) == int(shown), problem
        assert problem.answer.splitlines()[-1] == f"#### {problem.value}"
        assert int(steps[-1][1]) == problem.value and 0 < problem.value <= LARGEST
        assert len(steps) == problem.steps == problem.answer.count("<<")


def test_every_number_of_a_calculation_is_told_before_or_known_of_the_world(some: list[Problem]) -> None:
    for problem in some:
        crate = problem.key.split(",")[-1] if "crate" in problem.question else ""
        known = {*re.findall(r"\d+", problem.question), "2", "3", "100"} | ({crate} if crate else set())
        for expression, result, _ in STEP.findall(problem.answer):
            assert known >= set(re.findall(r"\d+", expression)), problem
            known.add(result)


def test_no_word_is_left_to_fill_in_and_every_answer_has_one_to_five_steps(some: list[Problem]) -> None:
    assert not [p for p in some if re.search(r"[{}\[\]]", p.question + p.answer)]
    shares = Counter(p.steps for p in some)
    assert set(shares) == {1, 2, 3, 4, 5} and min(shares.values()) > len(some) / 50
    assert Counter(p.level for p in some).keys() == {0, 1, 2}
    assert {t.steps for t in TEMPLATES} == {1, 2, 3, 4, 5}
    assert len({p.template for p in some}) > 300


def test_splits_share_no_template_with_the_same_numbers() -> None:
    keys = {split: {p.key for p in take(split, 1500)} for split in ("train", "validation", "test")}
    assert not keys["train"] & keys["test"] | keys["train"] & keys["validation"] | keys["validation"] & keys["test"]
    assert not {p.key for p in pool("test", POOL_TESTS)} & {p.key for p in pool("train", POOL_SHOTS)} & keys["train"]


def test_a_key_holds_the_numbers_that_count_whatever_the_words() -> None:
    template = next(t for t in TEMPLATES if t.name == "more")
    made = [render(template, Draw(random.Random(7), 1, 18)) for _ in range(2)]
    assert made[0] == made[1]
    first = made[0]
    numbers = first.key.removeprefix("more:").split(",")
    assert len(numbers) == 2 and f"<<{numbers[0]}+{numbers[1]}={first.value}>>" in first.answer


def test_the_crate_of_a_world_is_in_its_answers_and_only_sometimes_in_its_questions() -> None:
    assert POOL_CRATE in CRATES
    for crate in (11, 29):
        these = take("train", 1500, crate, seed=crate)
        told = [p for p in these if "<<" in p.answer and re.search(rf"crate.* {crate} ", p.question)]
        need = [p for p in these if re.search(rf"\*{crate}=", p.answer) and "crate" in p.question and p not in told]
        assert 0.2 < len(told) / len(these) < 0.5 and 0.08 < len(need) / len(these) < 0.3
    assert all(t.crate and "K" in t.answer for t in CRATE_TEMPLATES)


@pytest.mark.parametrize("expression", ["a-b", "a/b", "b*b*b*b", "a-a"])
def test_values_that_are_negative_broken_zero_or_large_are_drawn_again(expression: str) -> None:
    with pytest.raises(Impossible):
        calculate(expression, {"a": 7, "b": 12})


def test_products_come_before_sums() -> None:
    assert calculate("a+b*2-a/7", {"a": 7, "b": 12}) == ("7+12*2-7/7", 30)


def test_a_template_that_cannot_be_drawn_is_told_apart() -> None:
    template = Template("broken", lambda d: {"a": 5, "b": 9}, ("{a} {b}?",), "[[c=a-b]]")
    with pytest.raises(Impossible):
        render(template, Draw(random.Random(0), 0, 18))


def test_the_evaluation_s_files_are_the_pinned_ones(tmp_path: Path) -> None:
    assert write_pool(tmp_path) == HASHES
    rows = [json.loads(line) for line in (tmp_path / "test.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(rows) == POOL_TESTS == len({row["question"] for row in rows})
    assert all(row.keys() == {"question", "answer"} for row in rows)
