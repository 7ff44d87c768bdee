"""What --speculative and --draft-tokens come to, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rocm_serve.config.drafting import decide
from rocm_serve.config.experts import rows_of_a_request
from rocm_serve.config.schema import ServeConfig
from rocm_serve.errors import UserError
from tests.executor.wishes import facts

DRAFTING = replace(facts(), mtp_layers=1)


@pytest.mark.parametrize(
    ("wish", "tokens", "comes_to"),
    [("off", None, (0, False)), ("mtp", None, (3, False)), ("mtp", 4, (4, False)), ("auto", 1, (1, True))],
)
def test_a_wish_comes_to_a_number_with_its_reason(wish: str, tokens: int | None, comes_to: tuple[int, bool]) -> None:
    config = ServeConfig(model="m", speculative=wish, draft_tokens=tokens)  # type: ignore[arg-type]
    reasons: dict[str, str] = {}
    notes: list[str] = []
    decided = decide(config, DRAFTING, reasons, notes)
    assert decided == {"draft_tokens": comes_to[0], "adaptive_drafting": comes_to[1]}
    said = {"draft_tokens"} if comes_to[0] else set()
    assert reasons.keys() == said | ({"adaptive_drafting"} if comes_to[1] else set()) and not notes
    assert f"--speculative {wish}" in reasons.get("draft_tokens", "--speculative off")
    assert rows_of_a_request(config) == 1 + comes_to[0]


@pytest.mark.parametrize(
    ("changes", "mtp_layers", "words"),
    [
        ({"draft_tokens": 0}, 1, "--draft-tokens 0: legal: 1..4"),
        ({"draft_tokens": 5}, 1, "--draft-tokens 5: legal: 1..4"),
        ({}, 0, "no draft layer"),
        ({}, 2, "2 draft layers"),
    ],
)
def test_what_cannot_be_drafted_is_refused(changes: dict[str, int], mtp_layers: int, words: str) -> None:
    config = ServeConfig(model="m", speculative="mtp", **changes)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=words):
        decide(config, replace(DRAFTING, mtp_layers=mtp_layers), {}, [])


def test_a_number_without_drafting_is_named_as_without_effect() -> None:
    notes: list[str] = []
    assert decide(ServeConfig(model="m", draft_tokens=2), DRAFTING, {}, notes)["draft_tokens"] == 0
    assert "--draft-tokens 2 has no effect" in notes[0]
