"""The plan against what is there once a stage is loaded."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from rocm_serve.executor import budget
from rocm_serve.executor.loaded_stage import LoadedStage
from rocm_serve.executor.loading import load_stage_model
from rocm_serve.parallel.comm import SoloComm
from rocm_serve.parallel.mesh import Mesh
from tests.executor.wishes import resolved

SAID = re.compile(r"rank (\d): planned (\S+ \S+) \(weights .*, caches .*\), allocated (\S+ \S+) \(\+0\.00%\)")


@pytest.mark.parametrize("layout", ["text-fp8", "text-bf16", "vl-fp8", "dense"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_loaded_stage_holds_the_planned_bytes_and_says_so(
    checkpoints: dict[str, Path], layout: str, dtype: str, caplog: pytest.LogCaptureFixture
) -> None:
    wish = resolved(model=str(checkpoints[layout]), dtype=dtype, kv_cache_dtype="bfloat16")
    stage = load_stage_model(wish, Mesh(1, 1).coord(0), SoloComm())
    with caplog.at_level(logging.INFO):
        stage.runner(num_pages=5, num_slots=2)
    says_the_plan(stage, caplog)


@pytest.mark.parametrize("stage", [0, 1])
def test_with_drafts_every_stage_holds_the_planned_bytes_too(
    checkpoints: dict[str, Path], stage: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The last one holds the draft layer, and a copy of the embedding when the first stage is another."""
    wish = resolved(model=str(checkpoints["text-fp8"]), pp=2, draft_tokens=3, vocab_used=2000)
    loaded = load_stage_model(wish, Mesh(1, 2).coord(stage), SoloComm())
    with caplog.at_level(logging.INFO):
        loaded.runner(num_pages=5, num_slots=2)
    says_the_plan(loaded, caplog)


def says_the_plan(stage: LoadedStage, caplog: pytest.LogCaptureFixture) -> None:
    (said,) = [m for m in map(SAID.fullmatch, caplog.messages) if m]
    planned = stage.weight_bytes + 5 * stage.page_bytes + 3 * stage.slot_bytes
    assert int(said[1]) == stage.coord.rank and said[2] == said[3] == budget.human(planned)


def test_a_difference_between_plan_and_memory_is_said_with_its_sign() -> None:
    assert budget.planned_and_allocated(3, 900, 100, 1100) == (
        "rank 3: planned 1 KB (weights 900 bytes, caches 100 bytes), allocated 1.1 KB (+10.00%)"
    )
    assert budget.planned_and_allocated(0, 900, 100, 990).endswith("(-1.00%)")
