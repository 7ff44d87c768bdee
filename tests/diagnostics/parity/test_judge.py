"""Noise, bar and differences of log-probs."""

from __future__ import annotations

import math

import pytest

from rocm_serve.diagnostics.parity.drive import Row, Scored
from rocm_serve.diagnostics.parity.judge import difference, judge, rounding_noise, rule_of


def scored(*rows: Row) -> Scored:
    return Scored(1, list(range(len(rows) + 1)), list(rows))


def test_the_largest_difference_of_ids_that_both_report_counts() -> None:
    assert difference({1: -0.5, 2: -1.0}, {1: -0.6, 2: -1.3}) == pytest.approx(0.3)


def test_an_id_that_the_other_does_not_report_is_below_all_that_it_reports() -> None:
    assert difference({1: -0.1, 2: -3.0}, {3: -0.1, 2: -3.0}) == pytest.approx(2.9)


def test_an_id_that_is_missing_because_it_is_the_least_of_many_makes_no_difference() -> None:
    one = {token: -1.0 - token for token in range(20)}
    other = {**{token: -1.0 - token for token in range(19)}, 77: -20.0}
    assert difference(one, other) == 0.0


@pytest.mark.parametrize(
    ("dtype", "hf", "noise", "bar"),
    [
        ("float32", True, 1e-3, 2e-3),
        ("float32", False, 1e-6, 1e-4),
        ("bfloat16", False, 5e-3, 5e-3),
        ("bfloat16", False, 0.0, 1e-3),
    ],
)
def test_the_bar_follows_the_dtype(dtype: str, hf: bool, noise: float, bar: float) -> None:
    assert rule_of(dtype, hf=hf).bar(noise) == pytest.approx(bar)


def test_the_first_position_over_the_bar_is_named() -> None:
    a = scored({1: -1.0}, {1: -1.0}, {1: -1.0})
    b = scored({1: -1.00005}, {1: -1.01}, {1: -1.5})
    (found,) = judge([a], [a], [b], rule_of("float32", hf=False), None, {})
    assert (found.first, found.worst_at, found.noise_of_a) == (2, 3, 0.0)
    assert found.worst == pytest.approx(0.5)


def test_noise_of_a_raises_the_bar_and_hfs_replaces_it() -> None:
    a, again, b = scored({1: -1.0}), scored({1: -1.1}), scored({1: -1.15})
    (own,) = judge([a], [again], [b], rule_of("float32", hf=False), None, {})
    (of_hf,) = judge([a], [again], [b], rule_of("float32", hf=True), [0.0], {})
    assert own.first is None and own.bar == pytest.approx(0.2)
    assert of_hf.first == 1 and of_hf.bar == 1e-4


def test_rows_from_a_near_tie_on_are_not_judged() -> None:
    a = scored({1: -1.0}, {1: -1.0}, {1: -1.0})
    b = scored({1: -1.0}, {1: -9.0}, {1: -9.0})
    (found,) = judge([a], [a], [b], rule_of("float32", hf=False), None, {0: 1})
    assert found.first is None and found.near_tie == 1 and found.worst == 0.0


def test_log_probs_that_are_no_numbers_never_agree() -> None:
    a, b = scored({1: -1.0}), scored({1: math.nan})
    (found,) = judge([a], [a], [b], rule_of("float32", hf=False), None, {})
    assert found.first == 1


def test_where_sides_round_elsewhere_the_median_position_is_judged() -> None:
    a = scored({1: -1.0}, {1: -1.0}, {1: -1.0})
    one_flip = scored({1: -1.1}, {1: -9.0}, {1: -1.1})
    shifted = scored({1: -1.1}, {1: -1.9}, {1: -1.9})
    exact = scored({1: -1.2}, {1: -1.2}, {1: -5.0})
    noise = rounding_noise([a], [exact])
    assert noise == pytest.approx(0.2)
    rule = rule_of("bfloat16", hf=False, rounding=True)
    (flipped,) = judge([a], [a], [one_flip], rule, [noise], {})
    (wrong,) = judge([a], [a], [shifted], rule, [noise], {})
    assert flipped.first is None and flipped.worst == pytest.approx(8.0) and flipped.median == pytest.approx(0.1)
    assert wrong.first == 2 and wrong.bar == pytest.approx(0.8)
    assert "median" in str(rule)
