"""Where steps are planned ahead of their tokens: by wish and by what else was decided."""

from __future__ import annotations

from typing import Any

import pytest

from rocm_serve.config.ahead import decide, in_effect
from rocm_serve.config.schema import ServeConfig


def decided(
    device: Any = "rocm", graphs: int = 64, drafts: int = 0, **wish: Any
) -> tuple[object, str | None, list[str]]:
    reasons: dict[str, str] = {}
    notes: list[str] = []
    chosen: dict[str, object] = {"graph_max_batch": graphs, "draft_tokens": drafts}
    (value,) = decide(ServeConfig(model="m", **wish), device, chosen, reasons, notes).values()
    return value, reasons.get("plan_ahead"), notes


def test_by_default_it_is_on_for_one_stage_of_gpus_if_steps_are_captured() -> None:
    assert decided() == ("graphs", "auto: where decode steps are captured", [])
    assert decided(device="cpu", graphs=0) == ("off", "auto: on a CPU the host computes", [])
    assert decided(graphs=0) == ("off", "auto: no device graphs", [])
    assert decided(pp=2) == ("off", "auto: not measured with stages yet; --plan-ahead on", [])
    assert decided(pp=2, graphs=0) == ("off", "auto: no device graphs", [])
    value, why, notes = decided(drafts=3)
    assert value == "off" and why is not None and why.startswith("auto: which drafts") and not notes


def test_a_wish_is_met_where_it_can_be_and_otherwise_said() -> None:
    assert decided(plan_ahead="off") == ("off", None, [])
    assert decided(plan_ahead="on", device="cpu", graphs=0) == ("on", None, [])
    assert decided(plan_ahead="on", pp=2) == ("on", None, [])
    for pp in (1, 2):
        value, why, notes = decided(plan_ahead="on", drafts=1, pp=pp)
        assert value == "off" and notes == [f"--plan-ahead on has no effect: {why}"]


@pytest.mark.parametrize(
    ("decision", "captured", "comes_to"),
    [("off", 8, False), ("on", 0, True), ("on", 8, True), ("graphs", 0, False), ("graphs", 8, True)],
)
def test_what_was_captured_has_the_last_word(decision: Any, captured: int, comes_to: bool) -> None:
    assert in_effect(decision, captured) == comes_to
