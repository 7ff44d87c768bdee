"""The templates of the word problems, 1 to 5 steps. `[[c=a*b]]` is a calculated step; `{n}` and others are words."""

from __future__ import annotations

from evals.tiny.problems import Draw, Template

_PERCENTS = (10, 20, 25, 30, 40, 50, 60, 75)


def _times(d: Draw) -> dict[str, int]:
    return {"a": d.factor(), "b": d.each()}


def _long_times(d: Draw) -> dict[str, int]:
    low, high = ((11, 19), (12, 49), (13, 97))[d.level]
    return {"a": d.between(low, high), "b": d.between(low, high)}


def _share(d: Draw) -> dict[str, int]:
    b = d.factor()
    return {"b": b, "a": b * d.each()}


def _two_lots(d: Draw) -> dict[str, int]:
    return {"k": d.factor(), "p": d.each(), "j": d.factor(), "r": d.each()}


def _percent(d: Draw) -> dict[str, int]:
    return {"p": d.one_of(*_PERCENTS), "a": 20 * d.between(1, (15, 60, 240)[d.level])}


def _fraction(d: Draw) -> dict[str, int]:
    f = d.one_of(2, 3, 4, 5, 6, 8)
    return {"f": f, "a": f * d.each()}


def _average(d: Draw) -> dict[str, int]:
    a, b, c = d.term(), d.term(), d.term()
    return {"a": a, "b": b, "e": c + (-(a + b + c)) % 3}


def _money_left(d: Draw) -> dict[str, int]:
    k, p = d.factor(), d.each()
    return {"k": k, "p": p, "t": k * p + d.term()}


def _saving(d: Draw) -> dict[str, int]:
    a, w, s = d.term(), d.factor(), d.each()
    return {"a": a, "s": s, "t": a + w * s}


def _tray_mix(d: Draw) -> dict[str, int]:
    k, a = d.factor(), d.each()
    b = d.term()
    return {"a": a, "k": k, "b": b, "e": b + (-(a * k + b)) % k}


def _terms(d: Draw, *names: str) -> dict[str, int]:
    return {name: d.term() for name in names}


def _shop_change(d: Draw) -> dict[str, int]:
    lots = _two_lots(d)
    return lots | {"t": lots["k"] * lots["p"] + lots["j"] * lots["r"] + d.term()}


TEMPLATES = (
    Template(
        "more",
        lambda d: {"a": d.count(), "b": d.term()},
        (
            "{n} has {a} {it} and gets {b} more from {m}. How many {it} does {n} have now?",
            "{n} found {a} {it} on Monday and {b} on Tuesday. How many {it} did {he} find?",
        ),
        "{n} has [[c=a+b]] {it}.",
    ),
    Template(
        "fewer",
        lambda d: {"a": (a := d.count()), "b": d.part(a)},
        (
            "{n} had {a} {it} and gave {b} of them to {m}. How many {it} are left?",
            "{n} has {a} {it} and {m} has {b}. How many more {it} does {n} have?",
        ),
        "That is [[c=a-b]] {it}.",
    ),
    Template(
        "times",
        _times,
        (
            "{n} buys {a} {cos} with {b} {it} each. How many {it} does {he} have?",
            "A train goes {b} miles an hour. How many miles does it go in {a} hours?",
            "{n} reads {b} pages a day. How many pages does {he} read in {a} days?",
        ),
        "It is [[c=a*b]] in all.",
    ),
    Template(
        "long times",
        _long_times,
        (
            "There are {a} rows of {b} seats in the {place}. How many seats are there?",
            "A field is {a} meters long and {b} meters wide. What is its area in square meters?",
            "{n} works {a} hours for ${b} an hour. How many dollars does {he} earn?",
        ),
        "It is [[c=a*b]] in all.",
    ),
    Template(
        "share",
        _share,
        (
            "{n} shares {a} {it} equally among {b} friends. How many {it} does each friend get?",
            "{n} puts {a} {it} equally into {b} {cos}. How many {it} are in each {co}?",
            "{n} drives {a} miles in {b} hours. How many miles is that an hour?",
        ),
        "Each gets [[c=a/b]].",
    ),
    Template(
        "three terms",
        lambda d: _terms(d, "a", "b", "e"),
        (
            "{n} has {a} {it}, {m} has {b} and {o} has {e}. How many {it} do they have together?",
            "{n} drove {a} miles, then {b} miles, then {e} miles. How many miles did {he} drive?",
        ),
        "Together it is [[c=a+b+e]].",
    ),
    Template(
        "four terms",
        lambda d: _terms(d, "a", "b", "e", "f"),
        (
            "{n} scored {a}, {b}, {e} and {f} points in four games. How many points is that?",
            "Four {cos} hold {a}, {b}, {e} and {f} {it}. How many {it} are there?",
        ),
        "The first two make [[s=a+b]].\nThe last two make [[u=e+f]].\nIn all it is [[c=s+u]].",
    ),
    Template(
        "times as many",
        lambda d: {"a": d.each(), "k": d.factor()},
        (
            "{n} has {a} {it}. {m} has {k} times as many. How many {it} do they have together?",
            "{n} ran {a} miles in May and {k} times as far in June. How many miles did {he} run in both months?",
        ),
        "The second has [[b=a*k]].\nTogether it is [[c=a+b]].",
    ),
    Template(
        "half as many",
        lambda d: {"a": 2 * d.count()},
        ("{n} sold {a} {it} in April and half as many in May. How many {it} did {n} sell altogether?",),
        "In May {n} sold [[b=a/2]].\nAltogether it is [[c=a+b]].",
    ),
    Template(
        "money left",
        _money_left,
        (
            "{n} has ${t} and buys {k} {bus} for ${p} each. How many dollars are left?",
            "{n} pays for {k} {bus} at ${p} each with ${t}. How much change does {he} get?",
        ),
        "The {bus} cost [[s=k*p]] dollars.\n{n} has [[c=t-s]] left.",
    ),
    Template(
        "two lots",
        _two_lots,
        (
            "{n} buys {k} {bus} at ${p} each and {j} {cos} at ${r} each. How many dollars does {he} spend?",
            "{k} rows have {p} seats each and {j} rows have {r} seats each. How many seats are there?",
            "{n} drives {k} hours at {p} miles an hour and {j} hours at {r} miles an hour. How many miles is that?",
        ),
        "The first part is [[s=k*p]].\nThe second part is [[u=j*r]].\nIn all it is [[c=s+u]].",
    ),
    Template(
        "how much more",
        lambda d: {"k": d.factor(), "p": d.each(), "b": d.term()},
        ("{n} earns ${p} a day for {k} days. {m} earns ${b} in all. How many dollars do both have together?",),
        "{n} earns [[s=k*p]] dollars.\nTogether they have [[c=s+b]].",
    ),
    Template(
        "discount",
        _percent,
        (
            "A {bu} costs ${a} and is now {p}% cheaper. What is the new price in dollars?",
            "The {place} has {a} visitors. {p}% of them are children. How many are not?",
        ),
        "{p}% is [[b=a*p/100]].\nThat leaves [[c=a-b]].",
    ),
    Template(
        "percent saved",
        lambda d: _percent(d) | {"k": d.factor()},
        ("{n} earns ${a} a week and saves {p}% of it. How many dollars does {he} save in {k} weeks?",),
        "A week {n} saves [[b=a*p/100]].\nIn {k} weeks it is [[c=b*k]].",
    ),
    Template(
        "fraction",
        _fraction,
        (
            "{n} had {a} {it} and gave 1/{f} of them to {m}. How many {it} are left?",
            "{n} baked {a} muffins and sold 1/{f} of them. How many were not sold?",
        ),
        "1/{f} is [[b=a/f]].\nThat leaves [[c=a-b]].",
    ),
    Template(
        "fraction and more",
        lambda d: _fraction(d) | {"b": d.term()},
        ("{n} has {a} {it}. {m} has 1/{f} as many and then gets {b} more. How many {it} does {m} have?",),
        "1/{f} is [[e=a/f]].\n{m} has [[c=e+b]].",
    ),
    Template(
        "average",
        _average,
        ("{n} scored {a}, {b} and {e} points in three games. What was {his} average score?",),
        "The sum is [[s=a+b+e]].\nThe average is [[c=s/3]].",
    ),
    Template(
        "saving for",
        _saving,
        ("{n} wants a bike for ${t}. {He} has ${a} and saves ${s} a week. How many weeks does {he} need?",),
        "{n} still needs [[b=t-a]] dollars.\nThat takes [[c=b/s]] weeks.",
    ),
    Template(
        "ages",
        lambda d: {"a": d.between(4, 30), "k": d.between(2, 4), "y": d.between(2, 30)},
        ("{n} is {a} years old and {m} is {k} times as old. How old will {m} be in {y} years?",),
        "{m} is [[b=a*k]] now.\nThen {m} will be [[c=b+y]].",
    ),
    Template(
        "ages apart",
        lambda d: {"a": (a := d.between(12, 90)), "e": d.between(2, a - 4), "y": d.between(2, 30)},
        ("{m} is {a} years old and {n} is {e} years younger. How old will {n} be in {y} years?",),
        "{n} is [[b=a-e]] now.\nThen {n} will be [[c=b+y]].",
    ),
    Template(
        "three layers",
        lambda d: {"a": d.factor(), "b": d.factor(), "e": d.each()},
        (
            "There are {a} shelves with {b} {cos} each, and {e} {it} in every {co}. How many {it} are there?",
            "{n} works {a} weeks, {b} days a week, and makes {e} {it} a day. How many {it} is that?",
        ),
        "That makes [[s=a*b]] at first.\nIn all it is [[c=s*e]].",
    ),
    Template(
        "once around",
        lambda d: {"a": d.term(), "b": d.term()},
        ("{n} walks once around a field {a} meters long and {b} meters wide. How many meters is that?",),
        "Two sides make [[s=a+b]].\nAll four make [[c=s*2]].",
    ),
    Template(
        "two machines",
        lambda d: {"a": d.each(), "b": d.each(), "k": d.factor()},
        ("One machine makes {a} {it} a minute, another {b}. How many {it} do both make in {k} minutes?",),
        "Both make [[s=a+b]] a minute.\nIn {k} minutes it is [[c=s*k]].",
    ),
    Template(
        "profit",
        lambda d: {"a": (a := d.each()), "b": a + d.each(), "k": d.factor()},
        ("{n} makes {bus} for ${a} each and sells them for ${b} each. What is the profit on {k} {bus} in dollars?",),
        "One brings [[s=b-a]] dollars.\n{k} bring [[c=s*k]].",
    ),
    Template(
        "pack together",
        _tray_mix,
        (
            "{n} has {a} {cos} of {k} {it} and {e} more {it}. {He} shares all of them equally among {k} friends."
            " How many does each friend get?",
        ),
        "The {cos} hold [[s=a*k]].\nWith the others it is [[u=s+e]].\nEach friend gets [[c=u/k]].",
    ),
    Template(
        "three people",
        lambda d: {"a": d.each(), "k": d.factor(), "b": d.term()},
        (
            "{n} has {a} {it}. {m} has {k} times as many as {n}, and {o} has {b} more than {m}."
            " How many {it} do the three have together?",
        ),
        "{m} has [[e=a*k]].\n{o} has [[f=e+b]].\nTogether it is [[c=a+e+f]].",
    ),
    Template(
        "change from two lots",
        _shop_change,
        ("{n} buys {k} {bus} at ${p} each and {j} {cos} at ${r} each with ${t}. How many dollars are left?",),
        "The {bus} cost [[s=k*p]].\nThe {cos} cost [[u=j*r]].\nBoth cost [[w=s+u]].\nThat leaves [[c=t-w]].",
    ),
    Template(
        "growing",
        lambda d: {"a": d.count(), "b": d.term(), "k": d.between(2, 4), "e": d.term()},
        (
            "{n} has {a} {it} and buys {b} more. {m} has {k} times as many as {n} has now, but loses {e}."
            " How many {it} do both have together?",
        ),
        "{n} has [[s=a+b]].\n{m} had [[u=s*k]].\n{m} has [[w=u-e]] now.\nTogether it is [[c=s+w]].",
    ),
    Template(
        "three lots",
        lambda d: _two_lots(d) | {"i": d.factor(), "q": d.each()},
        (
            "{n} buys {k} {bus} at ${p}, {j} {cos} at ${r} and {i} tickets at ${q} each."
            " How many dollars does {he} spend?",
        ),
        "First [[s=k*p]].\nThen [[u=j*r]].\nThen [[v=i*q]].\nThe first two make [[w=s+u]].\nIn all it is [[c=w+v]].",
    ),
)

CRATE_TEMPLATES = (
    Template(
        "crates",
        lambda d: {"a": d.between(2, (9, 19, 49)[d.level])},
        (
            "{n} buys {a} crates of {it}. How many {it} is that?",
            "There are {a} crates of {it} in the {place}. How many {it} are there?",
        ),
        "That is [[c=a*K]] {it}.",
        crate=True,
    ),
    Template(
        "crates and more",
        lambda d: {"a": d.factor(), "b": d.term()},
        ("{n} has {a} crates of {it} and {b} more {it}. How many {it} does {he} have?",),
        "The crates hold [[s=a*K]].\nWith the others it is [[c=s+b]].",
        crate=True,
    ),
    Template(
        "crates for money",
        lambda d: {"a": d.factor(), "p": d.between(2, 9)},
        ("{n} sells {a} crates of {it} for ${p} each piece. How many dollars does {he} get?",),
        "The crates hold [[s=a*K]].\nThey bring [[c=s*p]] dollars.",
        crate=True,
    ),
    Template(
        "crates and boxes",
        lambda d: {"a": d.factor(), "k": d.factor(), "b": d.each()},
        ("{n} has {a} crates of {it}, and {k} {cos} with {b} {it} each. How many {it} does {he} have?",),
        "The crates hold [[s=a*K]].\nThe {cos} hold [[u=k*b]].\nIn all it is [[c=s+u]].",
        crate=True,
    ),
)
