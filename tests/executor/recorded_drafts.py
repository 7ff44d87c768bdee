"""The stand-in recorder for steps with drafts: as tests/executor/recorded.py, for whatever a step leaves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch

from rocm_serve.executor.draft_steps import DraftSteps
from rocm_serve.executor.loading import LoadedStage
from rocm_serve.executor.runner import StageRunner
from rocm_serve.messages import Plan
from tests.executor.recorded import POISON, Recorded

T = TypeVar("T")


class RecordedDrafts(Recorded):
    """`sizes`: rows that were replayed, in order: of the model's steps, and of all that the draft layer drew."""

    def host_copy(self, values: torch.Tensor, bound: tuple[int, ...]) -> tuple[int, ...]:
        found = tuple(values.tolist())
        assert len(found) == len(bound) and all(x <= y for x, y in zip(found, bound, strict=True)), "beyond the bound"
        return found

    def record(self, run: Callable[[], T]) -> Callable[[], T]:
        left = run()
        outputs = tensors(left)

        def replay() -> T:
            for into, out_of in zip(outputs, tensors(run()), strict=True):
                into.fill_(float("nan")).copy_(out_of)
            self.sizes.append(len(outputs[-1]))
            return left

        return replay


def tensors(left: Any) -> list[torch.Tensor]:
    every = (getattr(left, field.name) for field in fields(left))
    return [x for x in every if x is not None]


def poison_inputs(steps: DraftSteps) -> None:
    """From now on, whatever a step does not write to its static memory is garbage when it runs."""
    plain = steps.takes

    def takes(plan: Plan) -> bool:
        steps._inputs.fill_(POISON)
        steps._judged.fill_(POISON)
        steps._pages_BP.fill_(1 << 30)
        if steps._hidden_TH is not None:
            steps._hidden_TH.fill_(float("nan"))
        return plain(plan)

    steps.takes = takes  # type: ignore[method-assign]


def with_graphs(
    stage: LoadedStage, plain: StageRunner, recorder: RecordedDrafts, *, poisoned: bool = False
) -> StageRunner:
    """Return a runner of the same parts whose decode steps are recorded already."""
    slots = next(iter((plain.cache.ssm or plain.cache.k_pages).values())).shape[0] - 1
    steps = stage.draft_steps(plain.cache, plain.table, plain.sampler, slots, recorder)
    if poisoned:
        poison_inputs(steps)
    assert steps.capture(lambda size: None) > 0
    recorder.sizes.clear()
    return replace(plain, decode=steps)
