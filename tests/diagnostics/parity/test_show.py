"""What a comparison says of A's own noise."""

from __future__ import annotations

import pytest

from rocm_serve.diagnostics.parity.drive import Row, Scored
from rocm_serve.diagnostics.parity.flow import Parity
from rocm_serve.diagnostics.parity.judge import FP8_ROWS, Rule, judge, rule_of
from rocm_serve.diagnostics.parity.show import sentences

EXACT = rule_of("float32", hf=False)
BF16 = rule_of("bfloat16", hf=False, rounding=True)
FP8 = rule_of(FP8_ROWS, hf=False, rounding=True)


def scored(*values: float) -> Scored:
    rows: list[Row] = [{1: value} for value in values]
    return Scored(1, list(range(len(rows) + 1)), rows)


def said(rule: Rule, again: Scored, noise: float) -> list[str]:
    """Compare three positions of A with themselves and with what A says the second time."""
    a = scored(-1.0, -1.0, -1.0)
    prompts = judge([a], [again], [a], rule, [noise], {})
    return list(sentences(Parity("tp=1", "tp=2", True, rule, None, tuple(prompts), None)))


def test_in_float32_a_single_position_that_differs_is_a_fault() -> None:
    first, last = said(EXACT, scored(-1.0, -4.0, -1.0), noise=1e-6)
    assert first.startswith("A differs from itself") and "one of its two forms is wrong" in first
    assert last == "agree"


@pytest.mark.parametrize("rule", [BF16, FP8], ids=["bf16", "fp8 rows"])
def test_where_rows_are_rounded_a_single_position_proves_nothing(rule: Rule) -> None:
    first, last = said(rule, scored(-1.0, -4.0, -1.0), noise=0.1)
    assert "wrong" not in first and "single positions of prompt 0, its medians are not: rounding" in first
    assert last == "agree"


def test_where_rows_are_rounded_medians_that_differ_are_a_fault() -> None:
    first, _ = said(BF16, scored(-4.0, -4.0, -1.0), noise=0.1)
    assert first.startswith("A differs from itself") and "one of its two forms is wrong" in first


@pytest.mark.parametrize("rule", [EXACT, BF16], ids=["float32", "bf16"])
def test_noise_below_the_bar_is_not_spoken_of(rule: Rule) -> None:
    assert said(rule, scored(-1.0, -1.00001, -1.0), noise=0.1) == ["agree"]
