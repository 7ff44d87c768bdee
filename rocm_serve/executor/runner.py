"""One rank at work: model, caches and request table; a plan and the previous stage's rows go in, rows or tokens out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from rocm_serve.cache.allocate import clear_slots
from rocm_serve.executor.heartbeat import Heartbeat, Phase
from rocm_serve.executor.inputs import Request, RequestTable, StepInputs, build_inputs
from rocm_serve.executor.memory import padded
from rocm_serve.executor.sampler import SampledToken, Sampler, SampleRow
from rocm_serve.messages import NewRequest, Plan, Sampled, StepResult, Work
from rocm_serve.ops.batch import ForwardBatch, StageCache
from rocm_serve.parallel.mesh import Coord
from rocm_serve.types import SamplingParams, TokenLogprob

WARM_UP_RID = -1
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)$")


class StageModel(Protocol):
    """What a stage's model does in a step. Shapes: T padded rows, R picked rows, V/t ids of this rank."""

    def forward(self, batch: ForwardBatch, hidden_TD: torch.Tensor | None) -> torch.Tensor:
        """Return the residual stream [T, H]; after the last stage it is normed."""
        ...

    def logits(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        """Return float32 [R, V/t]; last stage only."""
        ...


@dataclass(frozen=True, slots=True)
class StageRunner:
    """Runs plans on one rank, in order. Every rank of every stage is given the same plans."""

    model: StageModel
    coord: Coord
    cache: StageCache
    table: RequestTable
    sampler: Sampler | None  # on the last stage
    device: torch.device
    row_multiple: int

    def rows(self, plan: Plan) -> int:
        """Rows of the residual stream of this plan, padding included: what crosses each edge."""
        return padded(sum(work.num_rows for work in plan.work), self.row_multiple)

    @torch.inference_mode()
    def step(self, plan: Plan, hidden_TH: torch.Tensor | None) -> torch.Tensor | StepResult:
        """Run one plan. `hidden_TH` comes from the previous stage; the last stage returns the result.

        A plan without work only brings news of requests: it has no rows, and nothing crosses the edges.
        """
        clear_slots(self.cache, self.table.apply(plan))
        if not plan.work:
            return StepResult(plan.seq, ()) if self.coord.last_stage else self._no_rows()
        assert (hidden_TH is None) == self.coord.first_stage
        inputs = build_inputs(self.table, plan, self.cache, self.device, self.row_multiple)
        out_TH = self.model.forward(inputs.batch, hidden_TH)
        if not self.coord.last_stage:
            return out_TH
        return StepResult(plan.seq, tuple(self._outcomes(plan, inputs, out_TH)))

    def _no_rows(self) -> torch.Tensor:
        return torch.empty((0, 0), device=self.device)

    def _outcomes(self, plan: Plan, inputs: StepInputs, hidden_TH: torch.Tensor) -> Iterator[Sampled]:
        scores = self._score_prompts(inputs, hidden_TH)
        sampled = self._sample(inputs, hidden_TH)
        for work in plan.work:
            token = sampled.get(work.rid)
            prompt = scores.get(work.rid, ())
            if token is None:
                if prompt:
                    yield Sampled(work.rid, prompt_logprobs=prompt)
                continue
            logprobs = () if token.logprob is None else (token.logprob,)
            yield Sampled(work.rid, (token.token,), logprobs, prompt, accepted=1)

    def _sample(self, inputs: StepInputs, hidden_TH: torch.Tensor) -> dict[int, SampledToken]:
        assert self.sampler is not None
        if not inputs.sampled:
            return {}
        rids = [rid for rid, _ in inputs.sampled]
        logits_RV = self._logits(hidden_TH[[row for _, row in inputs.sampled]])
        rows = [_sample_row(self.table[rid]) for rid in rids]
        return dict(zip(rids, self.sampler.sample(logits_RV[: len(rids)], rows), strict=True))

    def _score_prompts(self, inputs: StepInputs, hidden_TH: torch.Tensor) -> dict[int, tuple[TokenLogprob, ...]]:
        assert self.sampler is not None
        if not inputs.scored:
            return {}
        picked = [i for rows in inputs.scored for i in range(rows.first_row, rows.first_row + len(rows.targets))]
        targets = [target for rows in inputs.scored for target in rows.targets]
        alternatives = [rows.alternatives for rows in inputs.scored for _ in rows.targets]
        scores = iter(self.sampler.prompt_logprobs(self._logits, hidden_TH[picked], targets, alternatives))
        return {rows.rid: tuple(next(scores) for _ in rows.targets) for rows in inputs.scored}

    def _logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        missing = -hidden_RH.shape[0] % self.row_multiple
        return self.model.logits(F.pad(hidden_RH, (0, 0, 0, missing)))


def _sample_row(request: Request) -> SampleRow:
    return SampleRow(
        params=request.params,
        position=request.num_tokens,
        num_generated=len(request.output),
        prompt_ids=request.prompt,
        output_ids=request.output,
        counts=request.counts,
    )


def phase_of(plan: Plan) -> Phase:
    """Say what a step consists of."""
    kinds = {work.recurrent for work in plan.work}
    if kinds == {False}:
        return Phase.PREFILL
    return Phase.DECODE if kinds == {True} else Phase.MIXED


def watch_layers(model: StageModel, heartbeat: Heartbeat) -> None:
    """Beat at the beginning of every decoder layer, from the thread that runs it."""
    if not isinstance(model, torch.nn.Module):
        return
    for name, module in model.named_modules():
        found = _LAYER.search(name)
        if found is not None:
            number = int(found[1])
            module.register_forward_pre_hook(lambda *_, number=number: heartbeat.layer(number))


def warm_up_plans(page_size: int, length: int) -> Iterator[Plan]:
    """Make plans that touch every kind of work once: a scored prompt, a token after it, forgetting.

    Their `seq` is -1: they are run beside the counted ones, through the same edges.
    """
    params = SamplingParams(max_tokens=2, temperature=0.0, logprobs=1, prompt_logprobs=1)
    prompt = tuple(0 for _ in range(min(4, length)))
    rid, slot = WARM_UP_RID, 1
    first_pages = tuple(range(-(-len(prompt) // page_size)))
    new = (NewRequest(rid, prompt, params),)
    yield Plan(-1, (Work(rid, 0, len(prompt), False, True, slot, first_pages),), new)
    if len(prompt) < length:
        after = len(prompt)
        page = tuple(range(len(first_pages), -(-(after + 1) // page_size)))
        yield Plan(-1, (Work(rid, after, 1, True, True, slot, page, tokens=(0,)),))
    yield Plan(-1, (), released=(rid,))
