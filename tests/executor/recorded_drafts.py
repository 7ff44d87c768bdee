"""The stand-in recorder for steps with drafts: as tests/executor/recorded.py, for whatever a step leaves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
from msgspec.structs import replace as changed

from rocm_serve.executor.draft_steps import DraftSteps
from rocm_serve.executor.loaded_stage import LoadedStage
from rocm_serve.executor.runner import StageRunner
from rocm_serve.messages import NewRequest, Plan, Work
from rocm_serve.types import SamplingParams
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


def plans_with_drafts(count: int, drafts: int, steps: int) -> list[Plan]:
    """Make plans as a scheduler would whose requests bring none, one, two, ... drafts in turns, some of them accepted.

    Pages 4 r to 4 r + 3 and slot r are those of request r, from 1 on, whose prompt is one token. All end at last.
    """
    rids, params = range(1, count + 1), SamplingParams(max_tokens=60, temperature=0.0)
    pages = {rid: tuple(range(4 * rid, 4 * rid + 4)) for rid in rids}
    first = tuple(Work(rid, 0, 1, False, True, rid, pages[rid], proposals=drafts) for rid in rids)
    made = [Plan(0, first, tuple(NewRequest(rid, (rid,), params) for rid in rids))]
    start, tried = dict.fromkeys(rids, 1), dict.fromkeys(rids, 0)
    for seq in range(1, steps):
        works = []
        for rid in rids:
            accepted, bring = (seq + rid) % (tried[rid] + 1), seq * rid % (drafts + 1)
            start[rid] += accepted
            tokens = tuple(7 + i for i in range(accepted + 1))
            tail = tuple(11 + rid + i for i in range(bring))
            wanted = (seq + 2 * rid) % (drafts + 1)
            works.append(Work(rid, start[rid], 1 + bring, True, True, rid, (), tokens, accepted, tail, wanted))
            start[rid] += 1
            tried[rid] = bring
        made.append(Plan(seq, tuple(works)))
    return [*made, Plan(steps, (), released=tuple(rids))]


def mixed_plans() -> list[Plan]:
    """Three requests that draft, replay and end; beside them one prompt in three chunks, and then two in one step."""
    plans = plans_with_drafts(3, 3, 8)
    scored = SamplingParams(max_tokens=9, temperature=0.0, logprobs=1, prompt_logprobs=1)
    new = NewRequest(7, tuple(range(30, 90)), scored), NewRequest(8, tuple(range(9, 25)), scored)
    extra = {
        2: (Work(7, 0, 20, False, False, 7, tuple(range(20, 24))),),
        3: (Work(7, 20, 13, False, False, 7),),
        5: (Work(7, 33, 27, False, True, 7, proposals=2), Work(8, 0, 16, False, True, 8, (24, 25), proposals=3)),
        6: (Work(9, 0, 5, False, False, 6, (26,)),),
    }
    news = {2: new[:1], 5: new[1:], 6: (NewRequest(9, (4,) * 8, scored),)}
    out = []
    for plan in plans:
        more = extra.get(plan.seq, ())
        gone = (7, 8) if plan.seq == 6 else (9,) if plan.released else ()
        out.append(
            changed(
                plan,
                work=plan.work + more,
                new=plan.new + news.get(plan.seq, ()),
                released=plan.released + gone,
            )
        )
    return out
