"""The tests against whole numbers: every tail is held against a sum of fractions."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocm_serve.diagnostics.gate.statistics import (
    Floor,
    binomial_at_most,
    floor_chance,
    interval,
    least_passing,
    mcnemar_worse,
)


def exact_at_most(count: int, trials: int, chance: Fraction) -> Fraction:
    terms = (math.comb(trials, k) * chance**k * (1 - chance) ** (trials - k) for k in range(count + 1))
    return sum(terms, Fraction(0))


@given(st.integers(1, 120), st.data())
def test_a_tail_is_the_sum_of_fractions(trials: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(-1, trials))
    chance = Fraction(data.draw(st.integers(1, 999)), 1000)
    expected = float(exact_at_most(count, trials, chance))
    assert binomial_at_most(count, trials, float(chance)) == pytest.approx(expected, rel=1e-9, abs=1e-300)


def test_a_tail_at_the_size_of_a_whole_run() -> None:
    for count in (1220, 1235, 1254, 1318):
        expected = float(exact_at_most(count, 1319, Fraction(1254, 1319)))
        assert binomial_at_most(count, 1319, 1254 / 1319) == pytest.approx(expected, rel=1e-9)


def test_tails_of_certain_events() -> None:
    assert binomial_at_most(3, 10, 0.0) == 1.0
    assert binomial_at_most(9, 10, 1.0) == 0.0
    assert binomial_at_most(10, 10, 1.0) == 1.0
    assert binomial_at_most(-1, 10, 0.5) == 0.0


@given(st.integers(1, 80), st.integers(1, 99), st.sampled_from([0.05, 0.01, 0.001]))
def test_the_least_passing_count_is_the_first_whose_tail_reaches_alpha(trials: int, percent: int, alpha: float) -> None:
    least = least_passing(trials, percent / 100, alpha)
    tails = [float(exact_at_most(k, trials, Fraction(percent, 100))) for k in range(trials + 1)]
    assert least == next(k for k, tail in enumerate(tails) if tail >= alpha)


def test_the_floors_of_the_published_score() -> None:
    """1241, 1235 and 1228 of 1319 are the published table's counts at 5, 1 and 0.1 %."""
    chance = 1254 / 1319
    assert [least_passing(1319, chance, alpha) for alpha in (0.05, 0.01, 0.001)] == [1241, 1235, 1228]
    assert Floor(chance, 1319).least_pooled == 2481, "0.9405 of two runs"


def test_a_run_is_clear_or_asks_for_one_more() -> None:
    floor = Floor(1254 / 1319, 1319)
    assert [floor.first(right) for right in (1319, 1235, 1234, 1228, 1227, 0)] == [
        *("pass", "pass", "rerun", "rerun", "fail", "fail"),
    ]


def test_two_runs_are_judged_by_their_sum_and_a_lucky_second_is_not_enough() -> None:
    floor = Floor(1254 / 1319, 1319)
    needed = floor.least_pooled
    assert floor.pooled(1230, needed - 1230) == "pass"
    assert floor.pooled(1230, needed - 1231) == "fail"
    assert floor.pooled(1230, 1236) == "fail", "a second run just above the floor does not mend the first"


@given(st.integers(0, 60), st.integers(0, 60))
def test_mcnemar_is_the_upper_tail_of_a_fair_coin(lost: int, gained: int) -> None:
    both = lost + gained
    expected = sum((Fraction(math.comb(both, k), 2**both) for k in range(lost, both + 1)), Fraction(0))
    assert mcnemar_worse(lost, gained) == pytest.approx(float(expected), rel=1e-12)


@pytest.mark.parametrize(("both", "at_5", "at_1"), [(20, 15, 16), (30, 20, 22), (40, 26, 28), (60, 37, 40)])
def test_the_least_losses_that_fail(both: int, at_5: int, at_1: int) -> None:
    for alpha, least in ((0.05, at_5), (0.01, at_1)):
        assert mcnemar_worse(least, both - least) < alpha <= mcnemar_worse(least - 1, both - least + 1)


@given(st.integers(1, 150), st.data())
def test_the_ends_of_an_interval_have_the_tails_they_promise(trials: int, data: st.DataObject) -> None:
    right = data.draw(st.integers(0, trials))
    low, high = interval(right, trials)
    assert 0 <= low <= right / trials <= high <= 1
    if right:
        assert 1 - float(exact_at_most(right - 1, trials, Fraction(low))) == pytest.approx(0.025, rel=1e-6)
    else:
        assert low == 0
    if right < trials:
        assert float(exact_at_most(right, trials, Fraction(high))) == pytest.approx(0.025, rel=1e-6)
    else:
        assert high == 1


def test_no_questions_have_no_interval() -> None:
    with pytest.raises(ValueError, match="no trials"):
        interval(0, 0)


def test_a_reference_without_an_error_still_forgives_one() -> None:
    assert floor_chance(195, 200) == 0.975
    assert Floor(floor_chance(64, 64), 64).least < 64
