"""Drafting on the last stage: which drafts were right, and what the draft head proposes for the next step.

A draft is right when it is the token that sampling draws at its place, by the very draw that plain decoding makes there
(its noise belongs to seed, choice, position and id): tokens with drafts are those without, sampled ones too. The draft
head draws with the same noise, which makes it agree more often than chance above temperature 0.

Letters: T padded rows, R picked rows, B requests that are drafted for, H width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from rocm_serve.executor.inputs import RequestTable, StepInputs, decode_batch
from rocm_serve.executor.sample_rows import SampleRow
from rocm_serve.executor.sampler import Sampler
from rocm_serve.executor.step_rows import padded
from rocm_serve.messages import Plan, Work
from rocm_serve.ops.batch import ForwardBatch, StageCache
from rocm_serve.types import SamplingParams


class DraftModel(Protocol):
    """What the draft head does in a step."""

    def forward(self, batch: ForwardBatch, hidden_TH: torch.Tensor) -> torch.Tensor:
        """Return [T, H]: row t is given token t + 1 and the main model's normed output at t."""
        ...

    def logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        """Return float32 [R, V/t] of this rank's ids."""
        ...


def accepted_of(drafts: Sequence[int], drawn: Sequence[int]) -> int:
    """Count the drafts before the first that is not the token drawn in its place.

    `drawn`: one token for the row before the first draft, and one for the row of each.
    """
    assert len(drawn) == len(drafts) + 1
    return next((i for i, draft in enumerate(drafts) if draft != drawn[i]), len(drafts))


@dataclass(slots=True)
class _Drafted:
    """A request on its way through the head: what it gets next is after `position`, and `hidden` row is its last."""

    work: Work
    row: SampleRow
    position: int  # of the last row that the head has seen
    tokens: list[int] = field(default_factory=list)


class DraftHead:
    """The head at work: once over all rows of a step, so that its cache follows the main model's, then row by row.

    The first pass writes rejected drafts into its cache as well; the next step writes over them before it reads.
    """

    def __init__(
        self,
        model: DraftModel,
        sampler: Sampler,
        table: RequestTable,
        cache: StageCache,
        device: torch.device,
        row_multiple: int,
    ) -> None:
        self._model = model
        self._sampler = sampler
        self._table = table
        self._cache = cache
        self._device = device
        self._row_multiple = row_multiple

    def propose(
        self, plan: Plan, inputs: StepInputs, hidden_TH: torch.Tensor, drawn: Mapping[int, Sequence[int]]
    ) -> dict[int, tuple[int, ...]]:
        """Return drafts for every Work that asks for proposals and draws.

        Shapes: hidden_TH [T, H], the main model's output, normed. `drawn`: by request, the token after each row that
        draws one: the last known row and those of its drafts.
        """
        after_T = np.zeros(len(inputs.batch.token_ids_T), dtype=np.int64)
        picked, drafted = [], []
        for work, start in zip(plan.work, inputs.batch.sequences.row_starts, strict=False):
            tokens = drawn.get(work.rid, ())
            after = self._after(work, tokens)
            after_T[start : start + len(after)] = after
            if tokens and work.proposals:
                accepted = accepted_of(work.drafts, tokens)
                last = work.num_rows - len(work.drafts) - 1 + accepted
                picked.append(start + last)
                row = self._row(work.rid, accepted)
                drafted.append(_Drafted(work, row, work.start + last))
        batch = replace(inputs.batch, token_ids_T=torch.from_numpy(after_T).to(self._device))
        hidden_TH = self._model.forward(batch, hidden_TH)
        if not drafted:
            return {}
        return self._draft(drafted, hidden_TH[picked])

    def _draft(self, drafted: list[_Drafted], hidden_BH: torch.Tensor) -> dict[int, tuple[int, ...]]:
        """Draw the first draft of each, then go on, one row a request and step, while it may have more."""
        every = {one.work.rid: one.tokens for one in drafted}
        while True:
            hidden_RH = F.pad(hidden_BH, (0, 0, 0, -hidden_BH.shape[0] % self._row_multiple))
            drawn = self._sampler.sample(self._model.logits(hidden_RH)[: len(drafted)], [one.row for one in drafted])
            for one, sampled in zip(drafted, drawn, strict=True):
                one.tokens.append(sampled.token)
                one.row.position += 1
                one.position += 1
            going_on = [i for i, one in enumerate(drafted) if len(one.tokens) < one.work.proposals]
            if not going_on:
                return {rid: tuple(tokens) for rid, tokens in every.items()}
            drafted = [drafted[i] for i in going_on]
            batch = decode_batch(
                self._table,
                [one.work for one in drafted],
                [one.position for one in drafted],
                [one.tokens[-1] for one in drafted],
                self._cache,
                self._device,
                self._row_multiple,
            )
            rows = padded(len(drafted), self._row_multiple)
            hidden_BH = F.pad(hidden_BH[going_on], (0, 0, 0, rows - len(drafted)))
            hidden_BH = self._model.forward(batch, hidden_BH)[: len(drafted)]

    def _after(self, work: Work, drawn: Sequence[int]) -> list[int]:
        """Return the token after each row: known ones, then what was drawn. Of a prompt that draws none, one less."""
        known_rows = work.num_rows - len(work.drafts)
        return [*self._table[work.rid].known(work.start + 1, work.start + 1 + known_rows), *drawn]

    def _row(self, rid: int, accepted: int) -> SampleRow:
        """Draw as the target will draw after the accepted drafts and one more, but from the plain distribution."""
        request = self._table[rid]
        asked = request.params
        params = SamplingParams(max_tokens=1, temperature=asked.temperature, seed=asked.seed, choice=asked.choice)
        return SampleRow(params, request.num_tokens + accepted + 1, 0)
