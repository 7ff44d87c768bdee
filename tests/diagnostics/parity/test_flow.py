"""By which rule two sides are judged: where either rounds rows to FP8, float32 is not float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rocm_serve.config.schema import Resolved, ServeConfig
from rocm_serve.diagnostics.parity import flow
from rocm_serve.diagnostics.parity.judge import FP8_ROWS, ROUNDING
from rocm_serve.diagnostics.parity.spec import parse_side
from tests.executor.wishes import resolved
from tests.made import small_checkpoint


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("flow")
    return {layout: small_checkpoint(folder / layout, layout, "none", seed=0) for layout in ("text-fp8", "text-bf16")}


def judged(model: Path, folder: Path, a: str, b: str) -> flow._Run:
    def prepare(config: ServeConfig, run_dir: Path) -> Resolved:
        names = ("tp", "ep", "expert_exchange", "fp8_activation", "dtype")
        given: dict[str, Any] = {name: getattr(config, name) for name in names if getattr(config, name) != "auto"}
        return resolved(model=str(model), run_dir=str(run_dir), **given)

    sides = [parse_side(text, model, flag, longest=70) for text, flag in ((a, "--a"), (b, "--b"))]
    given = flow.Comparison(model, *sides, [], 0, 2000, prepare, {}, folder)
    return flow._Run(given, lambda line: None)


@pytest.mark.parametrize(
    ("layout", "a", "b", "kind", "rounds"),
    [
        ("text-fp8", "tp=1", "tp=2", "float32", False),
        ("text-fp8", "fp8_activation=fp8_1x128", "tp=2", FP8_ROWS, True),
        ("text-fp8", "fp8_activation=fp8_1x128", "fp8_activation=fp8_1x128", FP8_ROWS, False),
        (
            "text-fp8",
            "fp8_activation=fp8_1x128,tp=2,ep=2",
            "fp8_activation=fp8_1x128,tp=2,ep=2,expert_exchange=torch",
            FP8_ROWS,
            True,
        ),
        ("text-fp8", "fp8_activation=fp8_1x128", "dtype=bfloat16", "bfloat16", True),
        ("text-bf16", "fp8_activation=fp8_1x128", "tp=2", "float32", False),
    ],
)
def test_sides_that_round_in_different_places_are_judged_by_their_medians(
    models: dict[str, Path], tmp_path: Path, layout: str, a: str, b: str, kind: str, rounds: bool
) -> None:
    run = judged(models[layout], tmp_path, a, b)
    assert (run.dtype, run.rounds) == (kind, rounds)
    assert (run.rule.of, run.rule.whose == ROUNDING) == (("median", True) if rounds else ("every", False))
    assert run.rule.least == (1e-4 if kind == "float32" else 1e-3)
