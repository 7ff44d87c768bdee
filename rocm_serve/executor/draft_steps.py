"""Decode steps of a server that drafts, at fixed sizes: verified, judged and drafted on from static inputs, captured.

Two kinds, each at a few batch sizes. Plain ones: a row a request, nothing to replay and no drafts wanted. The others:
the newest token and up to K drafts of each request, and of its last drafts the accepted ones once more. Their rows lie
one after the other, and padding behind them is no sequence's: it is read nowhere, and touches no expert.

A step is two graphs. The first has the model, the draw after each row, and which drafts that makes right; the second
the draft layer, over all rows and then row by row. So plain rows cost the host one wait; others are drawn between the
two, from the logits that the first leaves, by the code that samples without graphs.

Letters: B sequences of a size, K drafts, T rows (N padded to the row multiple), N = B (K + 1) rows, F draws, H width,
V ids of this rank.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

import numpy as np
import torch
import torch.nn.functional as F

from rocm_serve.errors import UserError
from rocm_serve.executor.decode import DecodedModel
from rocm_serve.executor.draft_inputs import Fields, blank, filled
from rocm_serve.executor.graphs import Recorder
from rocm_serve.executor.inputs import Request, RequestTable
from rocm_serve.executor.sample_rows import SampledToken
from rocm_serve.executor.sampler import Sampler
from rocm_serve.executor.speculative import DraftModel, accepted_of
from rocm_serve.executor.step_rows import padded
from rocm_serve.executor.upload import Array, Upload, offsets, views_of
from rocm_serve.messages import Plan, Sampled, StepResult, Work
from rocm_serve.ops.batch import ForwardBatch, Replay, Sequences, StageCache
from rocm_serve.ops.sampling.reference import NOTHING
from rocm_serve.types import TokenLogprob


@dataclass(frozen=True, slots=True)
class Verified:
    """What the model leaves: rows for the next stage, or on the last stage logits [N, V] and the draws [N, 3]."""

    hidden_TH: torch.Tensor
    logits_NV: torch.Tensor | None = None
    drawn_N3: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Drafted:
    """All draws of a step [F, 3]: those after its N rows, then B first drafts, B second ones, ..."""

    drawn_F3: torch.Tensor


@dataclass(slots=True)
class _Size:
    """One batch size and kind: views of the static memory, and the captured graphs once they are there."""

    size: int
    ahead: int  # K, or 0 for plain steps
    table_start: int  # where the page table lies among the bytes that arrive
    blank: torch.Tensor  # bytes of the inputs of a step without requests
    host: torch.Tensor  # those of the next step, on the host too
    arrays: Fields[Array]  # views of `host`
    fields: Fields[torch.Tensor]  # on the device
    after_T: torch.Tensor  # the token after each row
    accepted_B: torch.Tensor
    verify: Callable[[], Verified] | None = None
    draft: Callable[[], Drafted] | None = None

    @property
    def rows(self) -> int:
        return self.size * (self.ahead + 1)


class DraftSteps:
    """Runs such steps of one stage. `sizes` and `verified_sizes`: ascending, of plain steps and of those with drafts.

    With `captured`, `capture` records them all. `replays`: turn it off, and steps run without their graphs.
    """

    def __init__(
        self,
        model: DecodedModel,
        drafter: DraftModel | None,
        cache: StageCache,
        table: RequestTable,
        sampler: Sampler | None,
        *,
        sizes: Sequence[int],
        verified_sizes: Sequence[int],
        captured: bool,
        recorder: Recorder,
        max_pages: int,
        hidden_size: int | None,
        vocab_size: int,
        dtype: torch.dtype,
        device: torch.device,
        row_multiple: int,
    ) -> None:
        """`hidden_size`: of the rows that come from the stage before; None where this one embeds tokens."""
        assert (drafter is None) == (sampler is None), "the last stage draws and drafts"
        self.replays = True
        self._model = model
        self._drafter = drafter
        self._cache = cache
        self._table = table
        self._sampler = sampler
        self._sizes = {0: tuple(sizes), cache.draft_tokens: tuple(verified_sizes)}
        self._captured = captured
        self._recorder = recorder
        self._upload = Upload(device)
        self._multiple = row_multiple
        self._vocab_size = vocab_size
        kinds = [(ahead, size) for ahead, sizes in self._sizes.items() for size in sizes]
        blanks = {kind: blank(kind[1], kind[0], row_multiple) for kind in kinds}
        largest, rows = max(sizes), max(len(fields.token_ids_T) for fields in blanks.values())
        self._pages_BP = torch.zeros((largest, max_pages), dtype=torch.int32, device=device)
        fixed = max(offsets([x.nbytes for x in fields])[-1] for fields in blanks.values())
        room = offsets([fixed, self._pages_BP.nbytes])[-1]  # an upload ends where its last field is aligned
        self._inputs = torch.zeros(room, dtype=torch.uint8, device=device)
        self._judged = torch.zeros(offsets([8 * rows, 8 * largest])[-1], dtype=torch.uint8, device=device)
        self._hidden_TH = None
        if hidden_size is not None:
            self._hidden_TH = torch.zeros((rows, hidden_size), dtype=dtype, device=device)
        self._at = {kind: self._views(*kind, fields) for kind, fields in blanks.items()}

    @property
    def most_verified(self) -> int:
        """Return the largest number of requests of a step with drafts."""
        return self._sizes[self._cache.draft_tokens][-1]

    def takes(self, plan: Plan) -> bool:
        """Say whether the plan is such a step, of a size that there is."""
        works = plan.work
        if not works[-1].recurrent or len(works) > self._sizes[self._ahead(works)][-1]:  # recurrent rows come first
            return False
        return all([work.samples and work.num_rows == 1 + len(work.drafts) for work in works])  # noqa: C419

    def step(self, plan: Plan, hidden_TH: torch.Tensor | None) -> torch.Tensor | StepResult:
        """Run it, after `table.apply(plan)`. With plain rows it waits for the device once, on the last stage."""
        works, requests = plan.work, self._table.of(plan.work)
        ahead = self._ahead(works)
        sizes = self._sizes[ahead]
        at = self._at[ahead, sizes[bisect_left(sizes, len(works))]]
        self._fill(at, works, requests)
        if hidden_TH is not None:
            assert self._hidden_TH is not None
            self._hidden_TH[: len(hidden_TH)].copy_(hidden_TH)
        left = self._verify(at) if at.verify is None or not self.replays else at.verify()
        if self._sampler is None:
            return left.hidden_TH[: padded(sum([work.num_rows for work in works]), self._multiple)].clone()
        drawn = None
        if not all([request.sample.plain for request in requests]):  # noqa: C419 - twice as fast
            drawn = self._draw(self._sampler, at, left, works, requests)
        every = self._draft(at, left) if at.draft is None or not self.replays else at.draft()
        return StepResult(plan.seq, tuple(self._outcomes(self._sampler, at, every, works, drawn)))

    @torch.inference_mode()
    def capture(self, moved: Callable[[int], None]) -> int:
        """Record all steps, the largest first: smaller ones find room in its memory.

        Where steps are not captured each runs once, so that its kernels are compiled before requests come. Returns the
        largest plain size, 0 where none is captured. `moved` is told each size that is done. Every rank of a stage
        calls it: both run the collectives.
        Errors: UserError where the device refuses.
        """
        for at in sorted(self._at.values(), key=lambda at: at.rows, reverse=True):
            self._fill(at, (), [])
            if not self._captured:
                left = self._verify(at)
                if self._drafter is not None:
                    self._draft(at, left)
                moved(at.size)
                continue
            try:
                at.verify = self._recorder.record(partial(self._verify, at))
                if self._drafter is not None:
                    at.draft = self._recorder.record(partial(self._draft, at, at.verify()))
            except RuntimeError as error:
                first = str(error).partition("\n")[0]
                raise UserError(
                    f"decode steps of {at.size} requests with {at.ahead} drafts cannot be captured as a device graph:"
                    f" {first}; --graph-max-batch 0 serves without"
                ) from error
            moved(at.size)
        return self._sizes[0][-1] if self._captured else 0

    def _ahead(self, works: Sequence[Work]) -> int:
        """Return K where a work has anything to do with drafts, 0 for a plain step."""
        drafting = any([work.drafts or work.accepted or work.proposals for work in works])  # noqa: C419
        return self._cache.draft_tokens if drafting else 0

    def _views(self, ahead: int, size: int, fields: Fields[Array]) -> _Size:
        at = offsets([array.nbytes for array in fields])
        blank = torch.zeros(at[-1], dtype=torch.uint8)
        for view, array in zip(views_of(blank, fields), fields, strict=True):
            view.copy_(torch.from_numpy(array))
        host = blank.clone()
        judged = np.zeros_like(fields.token_ids_T), np.zeros(size, dtype=np.int64)
        return _Size(
            size,
            ahead,
            at[-1],
            blank,
            host,
            Fields(*(view.numpy() for view in views_of(host, fields))),
            Fields(*views_of(self._inputs, fields)),
            *views_of(self._judged, judged),
        )

    def _fill(self, at: _Size, works: Sequence[Work], requests: Sequence[Request]) -> None:
        """Bring a step's inputs to their places; what is beyond its requests is padding."""
        at.host.copy_(at.blank)
        pages_BP = np.zeros((at.size, 1), dtype=np.int32)
        if works:
            pages_NP = self._table.pages(works)
            pages_BP = np.zeros((at.size, pages_NP.shape[1]), dtype=np.int32)
            pages_BP[: len(works)] = pages_NP
            filled(at.arrays, works, requests, pages_NP, self._cache.page_size)
        self._upload.into(self._inputs, [at.host.numpy(), pages_BP])
        arrived = self._inputs[at.table_start : at.table_start + pages_BP.nbytes]
        width = pages_BP.shape[1]
        self._pages_BP[: at.size, :width].copy_(arrived.view(torch.int32).view(at.size, width))

    # What is captured: it reads static memory alone

    def _verify(self, at: _Size) -> Verified:
        """Run the model over all rows. On the last stage draw after each, and say which drafts were right."""
        hidden_TH = None if self._hidden_TH is None else self._hidden_TH[: len(at.after_T)]
        hidden_TH = self._model.forward(self._batch(at), hidden_TH)
        if self._sampler is None:
            return Verified(hidden_TH)
        logits_NV = self._model.logits(hidden_TH)[: at.rows]
        drawn_N3 = self._sampler.draw(logits_NV, at.fields.keys_N, at.fields.temperature_N)
        tokens_N = self._tokens(drawn_N3)
        at.after_T.copy_(F.pad(tokens_N, (0, len(at.after_T) - at.rows)))
        if at.ahead:
            at.accepted_B.copy_(accepted_by(tokens_N, at.fields, at.ahead))
        return Verified(hidden_TH, logits_NV, drawn_N3)

    def _draft(self, at: _Size, left: Verified) -> Drafted:
        """Run the draft layer over all rows with the tokens after them; then draw and go on, K times in all."""
        assert self._drafter is not None and self._sampler is not None and left.drawn_N3 is not None
        batch = replace(self._batch(at), token_ids_T=at.after_T)
        hidden_TH = self._drafter.forward(batch, left.hidden_TH)
        drawn = [left.drawn_N3]
        hidden_BH = hidden_TH[at.fields.row_starts_B1[:-1] + at.accepted_B] if at.ahead else hidden_TH
        for i in range(at.ahead):
            if i:
                batch = self._one_row_each(at, self._tokens(drawn[-1]), i)
                hidden_BH = self._drafter.forward(batch, hidden_BH)[: at.size]
            hidden_BH = F.pad(hidden_BH, (0, 0, 0, -at.size % self._multiple))
            keys_B1 = at.fields.draft_keys_BX.gather(1, (at.accepted_B + i)[:, None])
            logits_BV = self._drafter.logits(hidden_BH)[: at.size]
            drawn.append(self._sampler.draw(logits_BV, keys_B1[:, 0], at.fields.draft_temperature_B))
        return Drafted(torch.cat(drawn))

    def _tokens(self, drawn_R3: torch.Tensor) -> torch.Tensor:
        """Return tokens that can be embedded, also after rows of padding, whose logits may be anything."""
        return drawn_R3[:, 2].long().clamp(0, self._vocab_size - 1)

    def _batch(self, at: _Size) -> ForwardBatch:
        fields = at.fields
        widest = tuple(range(0, at.rows + 1, at.ahead + 1))
        starts = self._recorder.host_copy(fields.row_starts_B1, widest)
        contexts, slots = self._recorder.host_copies(fields.contexts_B, fields.slots_B)
        sequences = Sequences(
            row_starts=starts,
            contexts=contexts,
            slots=slots,
            num_recurrent=at.size,
            row_starts_B1=fields.row_starts_B1,
            contexts_B=fields.contexts_B,
            slots_B=fields.slots_B,
            page_table_BP=self._pages_BP[: at.size],
        )
        rows = fields.token_ids_T, fields.positions_T, fields.kv_index_N[: starts[-1]]
        replay = self._replay(at, sequences) if at.ahead else None
        return ForwardBatch(*rows, sequences, self._cache, replay, live_rows=fields.live_rows_1)

    def _replay(self, at: _Size, sequences: Sequences) -> Replay:
        fields, most = at.fields, 2 * at.ahead + 1
        widest = tuple(range(0, at.size * most + 1, most))
        run = replace(
            sequences,
            row_starts=self._recorder.host_copy(fields.extended_B1, widest),
            contexts=self._recorder.host_copy(fields.extended_contexts_B, sequences.contexts),
            row_starts_B1=fields.extended_B1,
            contexts_B=fields.extended_contexts_B,
            commits=self._recorder.host_copy(fields.commits_B, (most,) * at.size),
            commits_B=fields.commits_B,
        )
        return Replay(run, fields.own_N, fields.replayed_R, fields.sources_R, fields.drafts_D, fields.targets_D)

    def _one_row_each(self, at: _Size, tokens_B: torch.Tensor, place: int) -> ForwardBatch:
        """Lay a draft of each sequence behind its last row. Who wants none reads as before, and writes nothing."""
        fields, page_size = at.fields, self._cache.page_size
        wanted_B = place < fields.proposals_B
        ahead_B = (fields.proposals_B - 1).clamp(0, place)
        positions_B = fields.contexts_B + at.accepted_B + ahead_B
        pages_B = self._pages_BP[: at.size].gather(1, (positions_B // page_size)[:, None])[:, 0]
        kv_index_B = pages_B.long() * page_size + positions_B % page_size
        contexts_B = positions_B.int()
        contexts, slots = self._recorder.host_copies(contexts_B, fields.slots_B)
        sequences = Sequences(
            row_starts=tuple(range(at.size + 1)),
            contexts=contexts,
            slots=slots,
            num_recurrent=at.size,
            row_starts_B1=torch.arange(at.size + 1, dtype=torch.int32, device=tokens_B.device),
            contexts_B=contexts_B,
            slots_B=fields.slots_B,
            page_table_BP=self._pages_BP[: at.size],
        )
        beyond = (0, -at.size % self._multiple)
        rows = F.pad(tokens_B, beyond), F.pad(positions_B, beyond), torch.where(wanted_B, kv_index_B, -1)
        return ForwardBatch(*rows, sequences, self._cache, live_rows=fields.live_sequences_1)

    # Around the graphs

    def _draw(
        self, sampler: Sampler, at: _Size, left: Verified, works: Sequence[Work], requests: Sequence[Request]
    ) -> list[SampledToken]:
        """Draw what is not plain from the logits, and tell the draft layer."""
        assert left.logits_NV is not None
        rows = [row for w, request in zip(works, requests, strict=True) for row in request.next_samples(w.drafts)]
        drawn = sampler.sample(left.logits_NV[: len(rows)], rows)
        after_T = np.zeros(len(at.after_T), dtype=np.int64)
        after_T[: len(drawn)] = [one.token for one in drawn]
        accepted_B = np.zeros(at.size, dtype=np.int64)
        rest = iter(drawn)
        for b, work in enumerate(works):
            accepted_B[b] = accepted_of(work.drafts, [one.token for one in islice(rest, work.num_rows)])
        after, accepted = self._upload(after_T, accepted_B)
        at.after_T.copy_(after)
        at.accepted_B.copy_(accepted)
        return drawn

    def _outcomes(
        self, sampler: Sampler, at: _Size, every: Drafted, works: Sequence[Work], drawn: list[SampledToken] | None
    ) -> list[Sampled]:
        """Wait for the device and say what came out. `drawn`: what is known already."""
        found_F3 = every.drawn_F3.cpu()  # the one wait of a step with plain rows
        tokens: list[int] = found_F3[:, 2].long().tolist()
        if drawn is not None:
            tokens[: len(drawn)] = [one.token for one in drawn]
        out, first = [], 0
        for b, work in enumerate(works):
            own = tokens[first : first + work.num_rows]
            accepted = accepted_of(work.drafts, own) if work.drafts else 0
            logprobs = () if drawn is None else _logprobs(drawn[first : first + accepted + 1])
            place, end = at.rows + b, at.rows + at.size * work.proposals
            kept, drafts = tuple(own[: accepted + 1]), tuple(tokens[place : end : at.size])
            out.append(Sampled(work.rid, kept, logprobs, (), accepted, drafts))
            first += work.num_rows
        fine_F = (found_F3[:, 0] > 0) & (found_F3[:, 1] != NOTHING)
        if not fine_F.all():  # of padding, maybe
            _check(sampler, at, found_F3, works, out, [] if drawn is not None else range(first))
        return out


def _logprobs(kept: Sequence[SampledToken]) -> tuple[TokenLogprob, ...]:
    return tuple([one.logprob for one in kept if one.logprob is not None])


def _check(
    sampler: Sampler,
    at: _Size,
    found_F3: torch.Tensor,
    works: Sequence[Work],
    out: Sequence[Sampled],
    rows: Sequence[int],
) -> None:
    """Have the sampler refuse draws that somebody wants: those of `rows`, and the drafts that were asked for."""
    positions = [work.start + 1 + i for work in works for i in range(work.num_rows)] if rows else []
    places = list(rows)
    for b, (work, one) in enumerate(zip(works, out, strict=True)):
        places += [at.rows + b + at.size * i for i in range(work.proposals)]
        positions += [work.start + 2 + one.accepted + i for i in range(work.proposals)]
    sampler.tokens_of(found_F3[places], positions)


def accepted_by(tokens_N: torch.Tensor, fields: Fields[torch.Tensor], ahead: int) -> torch.Tensor:
    """Count each sequence's drafts before the first that is not the token drawn in its place: int64 [B]."""
    starts_B1 = fields.row_starts_B1[:, None]
    row_BK = starts_B1[:-1] + torch.arange(ahead, device=tokens_N.device)
    there_BK = row_BK + 1 < starts_B1[1:]
    row_BK = row_BK.clamp(max=len(tokens_N) - 2)
    right_BK = there_BK & (tokens_N[row_BK] == fields.token_ids_T[row_BK + 1])
    return right_BK.long().cumprod(1).sum(1)
