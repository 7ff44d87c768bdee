"""Chains: one quantity that changes from sentence to sentence, 1 to 5 steps, in any order of changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from evals.tiny.problems import Draw, Impossible, Problem, draw_words, fill, with_asides, work_out

STEPS = ((1, 2, 3, 4, 5), (10, 24, 28, 22, 16))  # how many calculated steps, and their weights


@dataclass(frozen=True, slots=True)
class Change:
    """One change: numbers by name (given the quantity before), sentences, and answer lines from `x` to `y`."""

    name: str
    steps: int
    draw: Callable[[Draw, int], dict[str, int]]
    sentences: tuple[str, ...]
    lines: tuple[str, ...]
    crate: bool = False


def _parts(d: Draw, quantity: int) -> dict[str, int]:
    """A factor that divides the quantity."""
    divisors = [k for k in range(2, 10) if quantity % k == 0]
    if not divisors:
        raise Impossible
    return {"k": d.one_of(*divisors)}


def _percent(d: Draw, quantity: int) -> dict[str, int]:
    whole = [p for p in (10, 20, 25, 30, 40, 50, 60, 75) if quantity * p % 100 == 0]
    if not whole:
        raise Impossible
    return {"p": d.one_of(*whole)}


def _less(d: Draw, quantity: int) -> dict[str, int]:
    if quantity < 9:
        raise Impossible
    return {"b": d.part(quantity)}


CHANGES = (
    Change(
        "gain",
        1,
        lambda d, _: {"b": d.term()},
        ("{m} brings {b} more.", "Then {he} finds another {b}.", "{He} buys {b} more."),
        ("Now it is [[y=x+b]].", "{b} more make [[y=x+b]]."),
    ),
    Change(
        "loss",
        1,
        _less,
        ("{He} gives {b} to {m}.", "{b} of them get lost.", "{He} sells {b}."),
        ("Then [[y=x-b]] are left.", "That leaves [[y=x-b]]."),
    ),
    Change(
        "growth",
        1,
        lambda d, _: {"k": d.between(2, (4, 6, 9)[d.level])},
        ("By June {he} has {k} times as many.", "{m} makes it {k} times as many."),
        ("{k} times as many are [[y=x*k]].",),
    ),
    Change(
        "parts",
        1,
        _parts,
        (
            "{He} shares them equally with friends, so that each of {k} people has the same, and keeps one share.",
            "{He} makes {k} equal parts and keeps one.",
        ),
        ("One part is [[y=x/k]].",),
    ),
    Change(
        "percent",
        2,
        _percent,
        ("{He} gives {p}% of them away.", "{p}% of them break."),
        ("{p}% is [[w=x*p/100]].\nThat leaves [[y=x-w]].",),
    ),
    Change(
        "packs",
        2,
        lambda d, _: {"k": d.factor(), "b": d.each()},
        ("{He} buys {k} {cos} of {b}.", "{m} brings {k} {cos} with {b} in each."),
        ("The {cos} hold [[w=k*b]].\nNow it is [[y=x+w]].",),
    ),
    Change(
        "sum",
        2,
        lambda d, _: {"a": d.term(), "b": d.term()},
        ("{m} brings {a} and {o} brings {b}.",),
        ("They bring [[w=a+b]].\nNow it is [[y=x+w]].",),
    ),
    Change(
        "crates",
        2,
        lambda d, _: {"k": d.factor()},
        ("{He} buys {k} crates more.", "{m} brings {k} crates."),
        ("{k} crates are [[w=k*K]].\nNow it is [[y=x+w]].",),
        crate=True,
    ),
)
_WEIGHTS = (4, 4, 3, 3, 2, 3, 2, 1)


def chain(draw: Draw) -> Problem:
    """Make a problem of a start and some changes. Errors: Impossible."""
    rng = draw.rng
    wanted = rng.choices(*STEPS)[0]
    words = draw_words(rng)
    quantity = draw.count()
    said, worked, names = [f"{words['n']} has {quantity} {words['it']}."], [], []
    left, crates = wanted, False
    while left:
        change = rng.choices(CHANGES, _WEIGHTS)[0]
        if change.steps > left or (names and names[-1] == change.name):
            continue
        values = {"x": quantity, **change.draw(draw, quantity)}
        if change.crate:
            values["K"] = draw.crate
            crates = True
        said.append(fill(rng.choice(change.sentences), values, words))
        text, quantity = work_out(rng.choice(change.lines), values, words)
        worked.append(text.rpartition("\n####")[0])
        names.append(change.name)
        left -= change.steps
    said.append(fill(rng.choice(("How many {it} does {n} have now?", "How many {it} are there?")), {}, words))
    name = f"chain {' '.join(names)}"
    numbers = (*draw.numbers, *((draw.crate,) if crates else ()))
    question = with_asides(draw, " ".join(said), words, crates)
    answer = "\n".join([*worked, f"#### {quantity}"])
    return Problem(name, draw.level, wanted, question, answer, quantity, f"{name}:{','.join(map(str, numbers))}")
