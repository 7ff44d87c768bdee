"""A stage whose modules are tapped is a stage: it loads, runs plans, and has no steps that bypass its ops."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rocm_serve.executor.runner import prompts_of_every_size, warm_up_plans
from rocm_serve.executor.tap_recorder import Taps
from rocm_serve.executor.taps import load_tapped_stage
from rocm_serve.messages import StepResult
from rocm_serve.parallel.comm import SoloComm
from rocm_serve.parallel.mesh import Mesh
from tests.executor.wishes import resolved


def test_a_tapped_stage_runs_plans_and_captures_nothing(checkpoint: Path, tmp_path: Path) -> None:
    stage = load_tapped_stage(resolved(model=str(checkpoint), run_dir=str(tmp_path)), Mesh(1, 1).coord(0), SoloComm())
    runner = stage.runner(num_pages=16, num_slots=2)
    drawn = []
    for plan in warm_up_plans(16, 256):
        result = runner.step(plan, None)
        assert isinstance(result, StepResult)
        drawn += [token for one in result.sampled for token in one.tokens]
    assert len(drawn) == 2 and runner.decode is None
    assert stage.capture(runner, lambda: None).graph_max_batch == 0
    for plan in prompts_of_every_size(16, 256, 100, 16, 2):
        result = runner.step(plan, None)
        assert isinstance(result, StepResult) and len(result.sampled) == sum(work.samples for work in plan.work)


def test_what_leaves_a_layer_is_what_enters_the_next(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer leaves its last addition to the norm of the next one: the stream between them is the sum."""
    seen: list[tuple[int, str, torch.Tensor]] = []
    monkeypatch.setattr(Taps, "stream", lambda taps, layer, name, rows: seen.append((layer, name, rows.clone())))
    stage = load_tapped_stage(resolved(model=str(checkpoint), run_dir=str(tmp_path)), Mesh(1, 1).coord(0), SoloComm())
    runner = stage.runner(num_pages=8, num_slots=2)
    for plan in warm_up_plans(16, 256):
        seen.clear()
        runner.step(plan, None)
        ends = {(layer, name): rows for layer, name, rows in seen}
        layers = 1 + max((layer for layer, _ in ends), default=-1)
        assert len(seen) == 2 * layers == (2 * stage.facts.num_layers if plan.work else 0)
        for layer in range(1, layers):
            before, after = ends[layer - 1, "stream_out"], ends[layer, "stream_in"]
            assert torch.equal(before, after) and before.abs().max() > 0
