"""A stage whose modules are tapped is a stage: it loads, runs plans, and has no steps that bypass its ops."""

from __future__ import annotations

from pathlib import Path

from rocm_serve.executor.runner import prompts_of_every_size, warm_up_plans
from rocm_serve.executor.taps import load_tapped_stage
from rocm_serve.messages import StepResult
from rocm_serve.parallel.comm import SoloComm
from rocm_serve.parallel.mesh import Mesh
from tests.executor.wishes import resolved


def test_a_tapped_stage_runs_plans_and_captures_nothing(checkpoint: Path, tmp_path: Path) -> None:
    stage = load_tapped_stage(resolved(model=str(checkpoint), run_dir=str(tmp_path)), Mesh(1, 1).coord(0), SoloComm())
    runner = stage.runner(num_pages=8, num_slots=2)
    drawn = []
    for plan in warm_up_plans(16, 256):
        result = runner.step(plan, None)
        assert isinstance(result, StepResult)
        drawn += [token for one in result.sampled for token in one.tokens]
    assert len(drawn) == 2 and runner.decode is None
    assert stage.capture(runner, lambda: None).graph_max_batch == 0
    for plan in prompts_of_every_size(16, 256, 100, 8, 2):
        result = runner.step(plan, None)
        assert isinstance(result, StepResult) and len(result.sampled) == len(plan.work)
