"""Loops are found, worked answers are not."""

from __future__ import annotations

import pytest

from rocm_serve.diagnostics.gate.degenerate import is_degenerate

WORKED = " She has 12 + 12 + 12 = <<12+12+12=36>>36 pears.\nShe sells 36 - 36 = <<36-36=0>>0 of them.\n#### 0\n\n"


@pytest.mark.parametrize(
    "text",
    [
        "!" * 8,
        "!" * 500,
        "\n!!!!!!!!!!!!!!!!\n",
        "abababababab",
        "The answer is 4. " * 8,
        WORKED + " 0" * 40,
        "We know that x. " + "So it is 12 and it is 12 and " * 6,
        "\ufffd" * 20,
    ],
)
def test_loops(text: str) -> None:
    assert is_degenerate(text)


@pytest.mark.parametrize(
    "text", ["", "   ", "12", "!!!!", "#### 100000", WORKED, WORKED * 2, "1000000000 - 1 = 999999999\n#### 999999999"]
)
def test_answers(text: str) -> None:
    assert not is_degenerate(text)
