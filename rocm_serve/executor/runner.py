"""One rank at work: model, caches and request table; a plan and the previous stage's rows go in, rows or tokens out."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from rocm_serve.cache.allocate import clear_slots
from rocm_serve.config.schema import Resolved
from rocm_serve.executor.decode import DecodeSteps
from rocm_serve.executor.draft_steps import DraftSteps
from rocm_serve.executor.heartbeat import Heartbeat, Phase
from rocm_serve.executor.inputs import RequestTable, SampledRows, StepInputs, build_inputs
from rocm_serve.executor.launched import Fetch, Fetched, Launched, joined
from rocm_serve.executor.parts import joined_rows, num_rows, parts_of
from rocm_serve.executor.prompt_steps import PromptSteps
from rocm_serve.executor.sample_rows import SampledToken, SampleRow
from rocm_serve.executor.sampler import Sampler
from rocm_serve.executor.speculative import DraftHead, DraftModel, accepted_of
from rocm_serve.executor.step_rows import padded
from rocm_serve.executor.upload import Upload
from rocm_serve.messages import NewRequest, Plan, Sampled, StepResult, Work
from rocm_serve.ops.batch import ForwardBatch, StageCache
from rocm_serve.parallel.mesh import Coord
from rocm_serve.types import SamplingParams, TokenLogprob

log = logging.getLogger(__name__)

WARM_UP_RID = -1
_GOING_ON = (4, 64)  # rows behind a prompt: a tile of attention each
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)$")


class StageModel(Protocol):
    """What a stage's model does in a step. Shapes: T padded rows, R picked rows, V/t ids of this rank."""

    @property
    def mtp(self) -> DraftModel | None:
        """The draft head, on the last stage of a server that drafts."""
        ...

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
    drafter: DraftHead | None = None  # on the last stage, where the server drafts
    # takes the steps that nothing but decode, at batch sizes of its own
    decode: DecodeSteps | DraftSteps | None = None
    upload: Upload | None = None  # None: one for each use
    # int64: token drawn last in each slot; None: no step is planned ahead, or another stage embeds tokens
    own_newest_S: torch.Tensor | None = None
    fetch: Fetch | None = None
    prompts: PromptSteps | None = None  # takes the steps with rows of prompts that there is a size for
    ahead: bool = False  # steps may be planned before the host knows the tokens of those before

    @property
    def newest_S(self) -> torch.Tensor | None:
        """Where the newest tokens are, by slot: steps of fixed sizes have them among their own memory."""
        return self.decode.newest_S if isinstance(self.decode, DecodeSteps) else self.own_newest_S

    def rows(self, plan: Plan) -> int:
        """Rows of the residual stream of this plan, padding included: what crosses each edge."""
        return padded(num_rows(plan), self.row_multiple)

    def step(self, plan: Plan, hidden_TH: torch.Tensor | None) -> torch.Tensor | StepResult:
        """Run one plan. `hidden_TH` comes from the previous stage; the last stage returns the result."""
        left = self.launch(plan, hidden_TH)
        return left.result() if isinstance(left, Launched) else left

    @torch.inference_mode()
    def launch(self, plan: Plan, hidden_TH: torch.Tensor | None) -> torch.Tensor | Launched:
        """Begin one plan; the last stage returns what will have its result.

        A plan without work only brings news of requests: it has no rows, and nothing crosses the edges. Behind a plan
        that names a hosted request none is launched before that has its result.
        """
        slots = self.table.apply(plan)
        assert self.newest_S is not None or not self.coord.first_stage or not any(work.pending for work in plan.work)
        if slots:
            clear_slots(self.cache, *self._uploaded(slots))
        if not plan.work:
            return Launched(plan.seq, tuple) if self.coord.last_stage else self._no_rows()
        assert (hidden_TH is None) == self.coord.first_stage
        if self.decode is not None and self.decode.takes(plan):
            return self._decoded(self.decode, plan, hidden_TH)
        parts = parts_of(plan, self.decode, self.prompts)
        if parts is not None:
            return self._in_parts(plan, *parts, hidden_TH)
        inputs = self._inputs(plan)
        if self.prompts is not None and self.prompts.takes(plan):
            out_TH = self.prompts.forward(inputs.rows, hidden_TH, self.newest_S)
        else:
            out_TH = self.model.forward(inputs.batch, hidden_TH)
        return self._left(plan, inputs, out_TH, self.draws_ahead(plan)) if self.coord.last_stage else out_TH

    def _inputs(self, plan: Plan) -> StepInputs:
        upload, newest_S = self.upload, self.newest_S
        return build_inputs(self.table, plan, self.cache, self.device, self.row_multiple, upload, newest_S)

    def _decoded(
        self, decode: DecodeSteps | DraftSteps, plan: Plan, hidden_TH: torch.Tensor | None
    ) -> torch.Tensor | Launched:
        if isinstance(decode, DecodeSteps):
            return decode.launch(plan, hidden_TH)
        left = decode.step(plan, hidden_TH)
        return Launched(plan.seq, lambda: left.sampled) if isinstance(left, StepResult) else left

    def _in_parts(
        self, plan: Plan, decoded: Plan, prompted: Plan, hidden_TH: torch.Tensor | None
    ) -> torch.Tensor | Launched:
        """Run prompts and then the requests that decode, each as a step of fixed size.

        In this order, since steps with drafts wait for the device: it has the prompts to run meanwhile.
        """
        assert self.decode is not None and self.prompts is not None
        count, rows = num_rows(decoded), num_rows(plan)
        first_TH, second_TH = (None, None) if hidden_TH is None else (hidden_TH[:count], hidden_TH[count:rows])
        inputs = self._inputs(prompted)
        out_TH = self.prompts.forward(inputs.rows, second_TH, self.newest_S)
        if not self.coord.last_stage:
            left_TH = self._decoded(self.decode, decoded, first_TH)
            assert isinstance(left_TH, torch.Tensor)
            return joined_rows(left_TH, count, out_TH, rows - count, self.rows(plan))
        silent = not inputs.sampled and not inputs.scored and self.drafter is None
        prompts = None if silent else self._left(prompted, inputs, out_TH, self.draws_ahead(plan))
        left = self._decoded(self.decode, decoded, first_TH)
        assert isinstance(left, Launched)
        return left if prompts is None else joined(left, prompts)

    def _left(self, plan: Plan, inputs: StepInputs, out_TH: torch.Tensor, ahead: bool) -> Launched:
        """Say what will have the result of rows that the last stage has come to."""
        if ahead and inputs.sampled:
            return self._drawn_ahead(plan, inputs, out_TH)
        if not inputs.sampled and not inputs.scored and self.drafter is None:
            return Launched(plan.seq, tuple, self._passed())
        return Launched(plan.seq, partial(self._outcomes, plan, inputs, out_TH))

    def draws_ahead(self, plan: Plan) -> bool:
        """Whether the newest plan draws tokens that later steps may read on the device: the same on every rank."""
        return (
            self.ahead
            and any(work.samples for work in plan.work)
            and not any(request.params.hosted for request in self.table.of(plan.work))
        )

    def keep_newest(self, slots: Sequence[int], tokens_N: torch.Tensor) -> None:
        """Have steps that are launched from now on read these tokens, int64, as the newest of their slots."""
        assert self.newest_S is not None
        (slots_N,) = self._uploaded(slots)
        self.newest_S.index_copy_(0, slots_N, tokens_N)

    def _passed(self) -> Fetched | None:
        """Return what is there when no more steps that draw nothing are under way than there should be.

        Without it they would be reported, and the next ones sent, before any of them has run. One after the other
        it is the step before this one, so that the next one comes while this one runs.
        """
        return None if self.fetch is None else self.fetch.mark(behind=0 if self.ahead else 1)

    def _drawn_ahead(self, plan: Plan, inputs: StepInputs, hidden_TH: torch.Tensor) -> Launched:
        """Draw without a word to the host, and keep the tokens where the next step reads them."""
        assert self.sampler is not None and self.fetch is not None
        sampler, works = self.sampler, [work for work in plan.work if work.samples]
        rows = self._draws(inputs)
        found_R3 = sampler.draw_rows(self._logits_of(inputs, hidden_TH, len(rows)), rows)
        if self.newest_S is not None:
            self.keep_newest([work.slot for work in works], found_R3[:, 2].long())
        fetched = self.fetch(found_R3)

        def tokens() -> list[Sampled]:
            drawn = sampler.tokens_of(fetched.wait(), [work.start + work.num_rows for work in works])
            return [Sampled(work.rid, (token,)) for work, token in zip(works, drawn, strict=True)]

        return Launched(plan.seq, tokens, fetched, found_R3)

    def _no_rows(self) -> torch.Tensor:
        return torch.empty((0, 0), device=self.device)

    def _outcomes(self, plan: Plan, inputs: StepInputs, hidden_TH: torch.Tensor) -> list[Sampled]:
        scores = self._score_prompts(inputs, hidden_TH)
        drawn = self._sample(inputs, hidden_TH)
        drafts: dict[int, tuple[int, ...]] = {}
        if self.drafter is not None:
            tokens = {rid: [one.token for one in rows] for rid, rows in drawn.items()}
            drafts = self.drafter.propose(plan, inputs, hidden_TH, tokens)
            if not tokens and (passed := self._passed()) is not None:
                passed.wait()
        if not scores and not self.cache.draft_tokens:
            return [_outcome(one, drawn[one.rid]) for one in inputs.sampled]
        samples = {one.rid: one for one in inputs.sampled}
        found = []
        for work in plan.work:
            prompt = scores.get(work.rid, ())
            if work.rid in samples:
                found.append(_outcome(samples[work.rid], drawn[work.rid], prompt, drafts.get(work.rid, ())))
            elif prompt:
                found.append(Sampled(work.rid, prompt_logprobs=prompt))
        return found

    def _sample(self, inputs: StepInputs, hidden_TH: torch.Tensor) -> dict[int, list[SampledToken]]:
        """Draw a token after every row that draws, by request: one, and one more for each of its drafts."""
        assert self.sampler is not None
        if not inputs.sampled:
            return {}
        rows = self._draws(inputs)
        drawn = iter(self.sampler.sample(self._logits_of(inputs, hidden_TH, len(rows)), rows))
        return {one.rid: [next(drawn) for _ in one.rows] for one in inputs.sampled}

    def _draws(self, inputs: StepInputs) -> list[SampleRow]:
        return [row for one in inputs.sampled for row in self.table[one.rid].next_samples(one.drafts, one.pending)]

    def _logits_of(self, inputs: StepInputs, hidden_TH: torch.Tensor, count: int) -> torch.Tensor:
        """Return the logits of the `count` rows that draw."""
        if inputs.sampled[-1].rows.stop == count:  # the first rows of the batch, as in every pure decode step
            logits_RV = self.model.logits(hidden_TH[: padded(count, self.row_multiple)])
        else:
            logits_RV = self._logits(self._picked(hidden_TH, [row for one in inputs.sampled for row in one.rows]))
        return logits_RV[:count]

    def _score_prompts(self, inputs: StepInputs, hidden_TH: torch.Tensor) -> dict[int, tuple[TokenLogprob, ...]]:
        assert self.sampler is not None
        if not inputs.scored:
            return {}
        picked = [i for rows in inputs.scored for i in range(rows.first_row, rows.first_row + len(rows.targets))]
        targets = [target for rows in inputs.scored for target in rows.targets]
        alternatives = [rows.alternatives for rows in inputs.scored for _ in rows.targets]
        scores = iter(
            self.sampler.prompt_logprobs(self._logits, self._picked(hidden_TH, picked), targets, alternatives)
        )
        return {rows.rid: tuple(next(scores) for _ in rows.targets) for rows in inputs.scored}

    def _picked(self, hidden_TH: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Return some rows. Torch would wait for the device, were it given a list."""
        (rows_R,) = self._uploaded(rows)
        return hidden_TH[rows_R]

    def _uploaded(self, numbers: Sequence[int]) -> list[torch.Tensor]:
        return (self.upload or Upload(self.device))(np.array(numbers, dtype=np.int64))

    def _logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        missing = -hidden_RH.shape[0] % self.row_multiple
        return self.model.logits(F.pad(hidden_RH, (0, 0, 0, missing)))


def _outcome(
    sampled: SampledRows,
    drawn: Sequence[SampledToken],
    prompt: tuple[TokenLogprob, ...] = (),
    drafts: tuple[int, ...] = (),
) -> Sampled:
    tokens = tuple([one.token for one in drawn])
    accepted = accepted_of(sampled.drafts, tokens)
    kept = drawn[: accepted + 1]
    logprobs = tuple([one.logprob for one in kept if one.logprob is not None])
    return Sampled(sampled.rid, tokens[: accepted + 1], logprobs, prompt, accepted, drafts)


def phase_of(plan: Plan) -> Phase:
    """Say what a step consists of."""
    if not plan.work or plan.work[-1].recurrent:  # recurrent rows come first
        return Phase.DECODE if plan.work else Phase.MIXED
    return Phase.MIXED if plan.work[0].recurrent else Phase.PREFILL


def watch_layers(model: StageModel, heartbeat: Heartbeat) -> None:
    """Beat at the beginning of every decoder layer, from the thread that runs it."""
    if not isinstance(model, torch.nn.Module):
        return
    for name, module in model.named_modules():
        found = _LAYER.search(name)
        if found is not None:
            number = int(found[1])
            module.register_forward_pre_hook(lambda *_, number=number: heartbeat.layer(number))


def start_up_plans(resolved: Resolved, num_pages: int, num_slots: int) -> list[Plan]:
    """Return the plans that every rank runs before it is ready, without its `prompts`: the same ones everywhere.

    Steps that these take are compiled as they are captured.
    """
    length = resolved.max_model_len
    plans = list(warm_up_plans(resolved.page_size, length, resolved.draft_tokens))
    if resolved.device != "cpu":
        plans += prompts_of_every_size(resolved.page_size, length, resolved.chunked_prefill_size, num_pages, num_slots)
    return plans


def warm_up_plans(page_size: int, length: int, draft_tokens: int = 0) -> Iterator[Plan]:
    """Make plans that touch every kind of work once: a scored prompt, a token after it, a draft, forgetting.

    Their `seq` is -1: they are run beside the counted ones, through the same edges.
    """
    params = SamplingParams(max_tokens=2, temperature=0.0, logprobs=1, prompt_logprobs=1)
    prompt = tuple(0 for _ in range(min(4, length)))
    rid, slot = WARM_UP_RID, 1
    after = len(prompt)
    drafts = (0,) * min(draft_tokens, length - after - 1)
    first_pages = tuple(range(-(-(after + len(drafts)) // page_size)))
    new = (NewRequest(rid, prompt, params),)
    yield Plan(-1, (Work(rid, 0, after, False, True, slot, first_pages, proposals=len(drafts)),), new)
    if after < length:
        end = after + 1 + len(drafts)
        page = tuple(range(len(first_pages), -(-end // page_size)))
        yield Plan(-1, (Work(rid, after, 1 + len(drafts), True, True, slot, page, tokens=(0,), drafts=drafts),))
    yield Plan(-1, (), released=(rid,))


def prompts_of_every_size(
    page_size: int, length: int, most_rows: int, num_pages: int, num_slots: int
) -> Iterator[Plan]:
    """Make steps of several prompts, with every power of two of rows up to `most_rows`, and with so many.

    They run as steps that no fixed size holds, whose tiles go by powers of two (ops/tiles.py): what is not compiled
    here is compiled while requests wait. Two prompts share the rows, and go on by few rows and by more behind them;
    four and eight are tried with few, since tiles of recurrences go by their number. As `warm_up_plans`, within what
    the caches hold: what does not fit is left out, and a line of the log names it.
    """
    left_out = []
    sizes = [1 << n for n in range(1, most_rows.bit_length()) if 1 << n < most_rows] + [most_rows]
    for many, rows in [(2, rows) for rows in sizes] + [(4, 16), (8, 16)]:
        wanted = (rows // many, *(more for more in _GOING_ON if many * more <= most_rows))
        if wanted[0] == 0 or rows > most_rows or many > num_slots:
            continue  # no step has them
        parts = wanted
        while parts and sum(parts) > min(length, num_pages // many * page_size):
            parts = parts[:-1]
        if parts:
            yield from _prompts_in_parts(many, parts, page_size)
        if parts != wanted:
            behind = f" behind {sum(parts)}" if parts else ""
            left_out.append(f"{many} x {wanted[len(parts)]}{behind}")
    if left_out:
        log.info(
            "steps with these prompt rows are not run before requests come, whose first ones may compile: %s;"
            " %d pages, or %d tokens of a request, do not hold them",
            *(", ".join(left_out), num_pages, length),
        )


def _prompts_in_parts(many: int, parts: tuple[int, ...], page_size: int) -> Iterator[Plan]:
    params = SamplingParams(max_tokens=1, temperature=0.0)
    rids = tuple(WARM_UP_RID - i for i in range(many))
    prompt = (0,) * sum(parts)
    new, start = tuple(NewRequest(rid, prompt, params) for rid in rids), 0
    for rows in parts:
        end = start + rows
        pages = range(-(-start // page_size), -(-end // page_size))
        works = tuple(
            Work(rid, start, rows, False, end == len(prompt), i + 1, tuple(page * many + i for page in pages))
            for i, rid in enumerate(rids)
        )
        yield Plan(-1, works, new)
        new, start = (), end
    yield Plan(-1, (), released=rids)
