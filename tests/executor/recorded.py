"""A recorder of steps without a GPU: a replay runs the recorded step once more on the same memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar, cast

import torch

from rocm_serve.executor.decode import DecodeSteps, Left
from rocm_serve.executor.loaded_stage import LoadedStage
from rocm_serve.executor.runner import StageRunner
from rocm_serve.messages import Plan

T = TypeVar("T")
POISON = 0xA5


class Recorded:
    """Gives the reference ops the host copies that they walk, read from the static inputs at every run.

    `sizes`: of the steps that were replayed, in order.
    """

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def host_copies(self, contexts_B: torch.Tensor, slots_B: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return tuple(contexts_B.tolist()), tuple(slots_B.tolist())

    def record(self, run: Callable[[], T]) -> Callable[[], T]:
        left = cast(Left, run())
        outputs = tensors(left)

        def replay() -> T:
            for into, out_of in zip(outputs, tensors(cast(Left, run())), strict=True):
                into.fill_(float("nan")).copy_(out_of)
            self.sizes.append(0 if left.drawn_B3 is None else len(left.drawn_B3))
            return cast(T, left)

        return replay


def tensors(left: Left) -> list[torch.Tensor]:
    return [x for x in (left.hidden_TH, left.logits_TV, left.drawn_B3) if x is not None]


def poison_inputs(steps: DecodeSteps) -> None:
    """From now on, whatever a step does not write to its static inputs is garbage when it runs."""
    plain = steps.takes

    def takes(plan: Plan) -> bool:
        kept = None if steps.newest_S is None else steps.newest_S.clone()  # left there by the step before
        steps._inputs.fill_(POISON)
        steps._placed = (-1, [])
        if kept is not None and steps.newest_S is not None:
            steps.newest_S.copy_(kept)
        steps._pages_BP.fill_(1 << 30)
        if steps._hidden_TH is not None:
            steps._hidden_TH.fill_(float("nan"))
        return plain(plan)

    steps.takes = takes  # type: ignore[method-assign]


def with_graphs(stage: LoadedStage, plain: StageRunner, recorder: Recorded, *, poisoned: bool = False) -> StageRunner:
    """Return a runner of the same parts whose decode steps are recorded already."""
    slots = next(iter((plain.cache.ssm or plain.cache.k_pages).values())).shape[0] - 1
    steps = stage.decode_steps(plain.cache, plain.table, plain.sampler, slots, recorder)
    if poisoned:
        poison_inputs(steps)
    assert steps.capture(lambda size: None) > 0
    recorder.sizes.clear()
    return replace(plain, decode=steps)
