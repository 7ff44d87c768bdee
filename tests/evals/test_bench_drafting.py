"""The figures of the drafting benchmark, from turns and pages that are made up. A run takes minutes and servers."""

from __future__ import annotations

import pytest

from evals.bench_drafting import Turn, gain, memory_share, order, rates, table
from rocm_serve.diagnostics.gate.server import parse_metrics


def turns(slow: list[float], on: float = 0.5, cpu_on: float = 2.0) -> list[Turn]:
    """Turns of one size in order; the machine is `slow` times slower in each. With drafts a turn takes `on` as long."""
    made = []
    for drafts, factor in zip(order([1, 3], len(slow) // 4), slow, strict=True):
        took, cpu = (on, cpu_on) if drafts else (1.0, 1.0)
        text = ("a", "b") if drafts != 3 else ("a", "c")
        accepted = (0.8, 0.4, 0.0)[:drafts]
        made.append(Turn(drafts, 4, 100, 10 * took * factor, 6 * cpu, 0.1 * took * factor, 2.0, accepted, text))
    return made


def test_every_turn_with_drafts_stands_between_two_without() -> None:
    assert order([1, 3], 2) == [0, 1, 0, 3, 0, 1, 0, 3, 0]
    assert order([2], 1) == [0, 2, 0]


def test_a_gain_is_that_over_the_turns_beside_it() -> None:
    one = gain(turns([1.0] * 9), 1)
    assert (one.batch, one.drafts, one.noise) == (4, 1, 1.0)
    assert (one.speed, one.decoding, one.cpu) == pytest.approx((2.0, 2.0, 2.0))
    assert one.accepted == (0.8,) and (one.same_texts, one.texts) == (4, 4)
    three = gain(turns([1.0] * 9), 3)
    assert three.accepted == (0.8, 0.4, 0.0) and (three.same_texts, three.texts) == (2, 4)


def test_a_machine_that_slows_down_harms_both_and_is_seen() -> None:
    """Four times slower at the end: a comparison of the mean with drafts to the first turn would be 40 % off."""
    slow = [1.0 + 3 * i / 8 for i in range(9)]
    one = gain(turns(slow), 3)
    assert one.speed == pytest.approx(2.0, rel=0.05) and one.decoding == pytest.approx(2.0, rel=0.05)
    assert one.noise == pytest.approx(4.0)


def test_rates_are_those_of_a_turn_by_place() -> None:
    page = """
rocm_serve_inter_token_seconds_sum 3.0
rocm_serve_inter_token_seconds_count 60.0
rocm_serve_decode_tokens_total 60.0
rocm_serve_decode_forwards_total 30.0
rocm_serve_draft_tokens_by_position_total{position="1"} 30.0
rocm_serve_draft_tokens_by_position_total{position="2"} 0.0
rocm_serve_accepted_draft_tokens_by_position_total{position="1"} 24.0
rocm_serve_accepted_draft_tokens_by_position_total{position="2"} 0.0
"""
    assert rates(parse_metrics(page), 2) == (0.05, 2.0, (0.8, 0.0))
    assert rates(parse_metrics(page), 0) == (0.05, 2.0, ())


def test_each_server_of_a_gpu_may_take_as_much_as_those_before_it_and_its_own() -> None:
    assert memory_share("cpu", 3) == ""
    assert [memory_share("cuda", count) for count in (1, 2, 3)] == [
        "--mem-fraction 0.15",
        "--mem-fraction 0.30",
        "--mem-fraction 0.45",
    ]


def test_the_table_has_a_line_for_each_size_and_number() -> None:
    made = table([gain(turns([1.0] * 9), drafts) for drafts in (1, 3)])
    assert made.row_count == 2 and list(made.columns[7].cells) == ["0.80", "0.80 0.40 0.00"]
