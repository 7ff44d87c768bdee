"""Seeded generator of grade-school word problems, answered the way GSM8K answers them. Standard library only.

An answer is one short sentence a step, each with its calculation as `<<a*b=c>>c`, and `#### N` on the last line.
A problem is a template with numbers; the wording (names, things, sentences) varies beside that. Which split a problem
belongs to depends on (template, numbers) alone, so no wording of a test problem was ever trained on.

One word needs the examples before it: a `crate` holds as many things as the *world* of a document says. Problems of
one document share a world, and only some of them state the number: with shots before the question a model can find
it there, without shots it cannot know.
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from evals.tiny.words import CONTAINERS, GOODS, NAMES, PLACES, PLURALS, THINGS

Split = Literal["train", "validation", "test"]
LARGEST = 9999  # no value of a problem is above this
CRATES = (6, 7, 8, 9, 11, 12, 13, 14, 15, 16, 17, 18, 19, 21, 22, 23, 24, 25, 26, 27, 28, 29)
LEVELS = (0, 1, 2)

_STEP = re.compile(r"\[\[(\w+)=([^\]]+)\]\]")
_FIELD = re.compile(r"\{(\w+)\}")
_TERM = re.compile(r"([-+*/])")


@dataclass(frozen=True, slots=True)
class Problem:
    """A question and its worked answer; `key` is (template, numbers), which decides the split."""

    template: str
    level: int
    steps: int
    question: str
    answer: str
    value: int
    key: str

    @property
    def split(self) -> Split:
        """Every twentieth key is for tests and every twentieth for validation."""
        bucket = zlib.crc32(self.key.encode()) % 20
        return "test" if bucket == 0 else "validation" if bucket == 1 else "train"


@dataclass(slots=True)
class Draw:
    """Numbers of one problem: ranges grow with the level (0: two digits, 1: three, 2: larger products and sums)."""

    rng: random.Random
    level: int
    crate: int
    numbers: list[int] = field(default_factory=list)

    def between(self, low: int, high: int) -> int:
        value = self.rng.randint(low, max(low, high))
        self.numbers.append(value)
        return value

    def one_of(self, *values: int) -> int:
        value = self.rng.choice(values)
        self.numbers.append(value)
        return value

    def count(self) -> int:
        """A number of things to begin with."""
        return self.between(*((6, 99), (40, 499), (250, 2999))[self.level])

    def term(self) -> int:
        """A number to add."""
        return self.between(*((3, 99), (20, 499), (150, 1999))[self.level])

    def part(self, of: int) -> int:
        """A number to take away from `of`."""
        return self.between(max(1, of // 9), of - 1)

    def factor(self) -> int:
        """A small number to multiply or divide by."""
        return self.between(2, (6, 9, 12)[self.level])

    def each(self) -> int:
        """The larger number of a product with `factor`."""
        return self.between(*((3, 29), (12, 99), (21, 199))[self.level])


@dataclass(frozen=True, slots=True)
class Template:
    """Numbers by name, wordings of the question, and the answer with `[[c=a*b]]` for a calculated step.

    `crate`: the answer uses the world's crate size as `K`.
    """

    name: str
    draw: Callable[[Draw], dict[str, int]]
    questions: tuple[str, ...]
    answer: str
    crate: bool = False

    @property
    def steps(self) -> int:
        return len(_STEP.findall(self.answer))


class Impossible(Exception):
    """These numbers make no problem: a value is too large, negative or not whole. Draw again."""


def calculate(expression: str, values: Mapping[str, int]) -> tuple[str, int]:
    """Return the expression with numbers for names, and its value: `a*b/100`, `a+b-c`; products before sums.

    Errors: Impossible for a value that is negative, not whole or above LARGEST.
    """
    pieces = [str(values[p]) if p in values else p for p in _TERM.split(expression)]
    return "".join(pieces), evaluate(pieces)


def evaluate(pieces: list[str]) -> int:
    """Evaluate numbers and operators in turn, products before sums, in whole numbers. Errors: Impossible."""
    total, sign, product = 0, 1, int(pieces[0])
    for operator, number in zip(pieces[1::2], map(int, pieces[2::2]), strict=True):
        if operator == "*":
            product *= number
        elif operator == "/":
            if number == 0 or product % number:
                raise Impossible
            product //= number
        else:
            total += sign * product
            sign, product = (1 if operator == "+" else -1), number
    total += sign * product
    if not 0 < total <= LARGEST:
        raise Impossible
    return total


def work_out(answer: str, values: dict[str, int], words: Mapping[str, str]) -> tuple[str, int]:
    """Fill in an answer: its steps in order (each binds its name in `values`), then its words.

    Errors: Impossible as for `calculate`.
    """
    last = 0

    def step(match: re.Match[str]) -> str:
        nonlocal last
        shown, last = calculate(match[2], values)
        values[match[1]] = last
        return f"<<{shown}={last}>>{last}"

    text = fill(_STEP.sub(step, answer), values, words)
    return f"{text}\n#### {last}", last


def fill(text: str, values: Mapping[str, int], words: Mapping[str, str]) -> str:
    """Put numbers and words in place of `{name}`."""
    return _FIELD.sub(lambda m: str(values[m[1]]) if m[1] in values else words[m[1]], text)


def draw_words(rng: random.Random) -> dict[str, str]:
    """Draw the people and things of one problem."""
    (n, he, his), (m, _, _), (o, _, _) = rng.sample(NAMES, 3)
    it, it2 = rng.sample(THINGS, 2)
    co, bu = rng.choice(CONTAINERS), rng.choice(GOODS)
    people = {"n": n, "m": m, "o": o, "he": he, "He": he.capitalize(), "his": his}
    things = {"it": it, "it2": it2, "co": co, "cos": PLURALS[co], "bu": bu, "bus": PLURALS[bu]}
    return people | things | {"place": rng.choice(PLACES)}


# Sentences with a number that no step needs, and sentences that tell the world's crate size.
_ASIDES = (
    "The walk to the {place} takes {x} minutes.",
    "It is {x} degrees outside.",
    "{m} has {x} {it2}.",
    "The {place} is {x} years old.",
    "There are {x} people in the {place}.",
    "{m} lives at number {x}.",
    "{his} friend {m} is {x} years old.",
    "There are also {x} {it2} in the {place}.",
)
_TOLD = (
    "A crate holds {K} of anything.",
    "Every crate here has {K} things in it.",
    "In the {place} a crate is always {K} things.",
)
ASIDE_SHARE = (0.1, 0.25, 0.4)  # by level
TOLD_SHARE = 0.4


def with_asides(draw: Draw, question: str, words: dict[str, str], uses_crate: bool) -> str:
    """Put sentences that are not needed in front of the question, more often at the higher levels.

    A problem that does not need the crate size sometimes tells it: that is where the next question finds it.
    """
    rng = draw.rng
    before = []
    if rng.random() < ASIDE_SHARE[draw.level]:
        before.append(fill(rng.choice(_ASIDES), {"x": rng.randint(2, (60, 200, 900)[draw.level])}, words))
    if not uses_crate and rng.random() < TOLD_SHARE:
        before.insert(rng.randint(0, len(before)), fill(rng.choice(_TOLD), {"K": draw.crate}, words))
    return " ".join([*(s[0].upper() + s[1:] for s in before), question])


def render(template: Template, draw: Draw) -> Problem:
    """Make one problem of a template. Errors: Impossible."""
    words = draw_words(draw.rng)
    values = template.draw(draw)
    if template.crate:
        values["K"] = draw.crate
    shown = dict(values)
    answer, value = work_out(template.answer, values, words)
    question = with_asides(draw, fill(draw.rng.choice(template.questions), shown, words), words, template.crate)
    crate = (draw.crate,) if template.crate else ()
    key = f"{template.name}:{','.join(map(str, (*draw.numbers, *crate)))}"
    return Problem(template.name, draw.level, template.steps, question, answer, value, key)
