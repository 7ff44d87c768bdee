"""Steps in which every request decodes one token: a few batch sizes, static inputs, captured where that is possible.

A batch is padded to the next size by sequences on the dummy slot. Its inputs lie in memory that never moves, and come
there in one transfer; captured or not, the same code runs on the same shapes, so tokens are the same either way.

Where steps are planned ahead of their tokens, the device remembers the newest token of each slot: a step takes its
tokens from there or from among its inputs, row by row, and puts what it draws there, if it draws: to the first of
several stages they come from the last (executor/newest.py). So the next step can be launched before the host has seen
a token of this one.

Letters: B sequences of a size, T rows (B padded to the row multiple), P pages of the longest request, H width,
V ids of this rank.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch

from rocm_serve.errors import UserError
from rocm_serve.executor.graphs import Recorder
from rocm_serve.executor.inputs import Request, RequestTable
from rocm_serve.executor.launched import Fetch, Launched
from rocm_serve.executor.sample_rows import SampleRow
from rocm_serve.executor.sampler import Sampler
from rocm_serve.executor.step_rows import padded
from rocm_serve.executor.upload import Array, Upload, offsets, views_of
from rocm_serve.messages import Plan, Sampled, StepResult, Work
from rocm_serve.ops.batch import ForwardBatch, Sequences, StageCache
from rocm_serve.ops.sampling import rng


class DecodedModel(Protocol):
    """The part of a stage's model that decodes."""

    def forward(self, batch: ForwardBatch, hidden_TD: torch.Tensor | None) -> torch.Tensor: ...
    def logits(self, hidden_RD: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Left:
    """What a step leaves: rows for the next stage, or on the last stage logits [T, V] and what `Sampler.draw` says."""

    hidden_TH: torch.Tensor
    logits_TV: torch.Tensor | None = None
    drawn_B3: torch.Tensor | None = None


@dataclass(slots=True)
class _Size:
    """One batch size: views of the static inputs, and its captured step once there is one."""

    size: int
    rows: int
    table_start: int  # where the page table lies among the bytes that arrive
    token_ids_T: torch.Tensor  # as the host knows them
    sources_T: torch.Tensor  # where each row's token is, in words of the static inputs
    positions_T: torch.Tensor
    kv_index_B: torch.Tensor
    keys_B: torch.Tensor
    row_starts_B1: torch.Tensor
    contexts_B: torch.Tensor
    slots_B: torch.Tensor
    temperature_B: torch.Tensor
    newest_B: torch.Tensor  # slots once more, as that which is drawn is kept by
    live_1: torch.Tensor
    replay: Callable[[], Left] | None = None


class DecodeSteps:
    """Runs such steps of one stage.

    `sizes`: ascending; `captured`: those of them that `capture` records. `replays`: turn it off, and steps run without
    their graphs. Buffers for the largest size are made here and stay.
    """

    def __init__(
        self,
        model: DecodedModel,
        cache: StageCache,
        table: RequestTable,
        sampler: Sampler | None,
        *,
        sizes: Sequence[int],
        captured: Sequence[int],
        recorder: Recorder,
        max_pages: int,
        hidden_size: int | None,
        dtype: torch.dtype,
        device: torch.device,
        row_multiple: int,
        slots_ahead: int = 0,
    ) -> None:
        """`hidden_size`: of the rows that come from the stage before; None where this one embeds tokens.

        `slots_ahead`: slots for which the newest token is kept on the device; 0: the host brings all tokens.
        """
        assert list(sizes) == sorted(set(sizes)) and set(captured) <= set(sizes)
        self.replays = True
        self._model = model
        self._cache = cache
        self._table = table
        self._sampler = sampler
        self._sizes = tuple(sizes)
        self._captured = tuple(captured)
        self._recorder = recorder
        self._upload = Upload(device)
        self._fetch = Fetch(device)
        self._multiple = row_multiple
        largest = sizes[-1]
        self._pages_BP = torch.zeros((largest, max_pages), dtype=torch.int32, device=device)
        fixed = offsets([x.nbytes for x in _blank(largest, padded(largest, row_multiple))])[-1]
        *_, newest, end = offsets([fixed, self._pages_BP.nbytes, 8 * (slots_ahead + 1)])
        self._inputs = torch.zeros(end, dtype=torch.uint8, device=device)
        self._words = self._inputs.view(torch.int64)
        self._first_newest = newest // 8
        self.newest_S: torch.Tensor | None = None  # by slot
        if slots_ahead:
            assert hidden_size is None, "the first stage embeds tokens"
            self.newest_S = self._words[newest // 8 : newest // 8 + slots_ahead + 1]
        self._hidden_TH = None
        if hidden_size is not None:
            rows = padded(largest, row_multiple)
            self._hidden_TH = torch.zeros((rows, hidden_size), dtype=dtype, device=device)
        self._placed: tuple[int, list[int]] = (
            0,
            [],
        )  # changes of the table, slots: whose pages lie in the table's rows
        self._at = {size: self._views(size) for size in sizes}

    def takes(self, plan: Plan) -> bool:
        """Say whether the plan is such a step, of a size that there is."""
        works = plan.work
        if len(works) > self._sizes[-1] or not works[-1].recurrent:  # recurrent rows come first
            return False
        return all([work.num_rows == 1 and work.samples for work in works])  # noqa: C419 - twice as fast

    def step(self, plan: Plan, hidden_TH: torch.Tensor | None) -> torch.Tensor | StepResult:
        """Run it, after `table.apply(plan)`. Waits for the device once on the last stage, never on others."""
        left = self.launch(plan, hidden_TH)
        return left.result() if isinstance(left, Launched) else left

    def launch(self, plan: Plan, hidden_TH: torch.Tensor | None) -> torch.Tensor | Launched:
        """Begin it. Where a row's draw is not plain, `result` draws, from memory that the next step writes to."""
        works, requests = plan.work, self._table.of(plan.work)
        at = self._at[self._sizes[bisect_left(self._sizes, len(works))]]
        self._fill(at, works, requests)
        if hidden_TH is not None:
            assert self._hidden_TH is not None
            self._hidden_TH[: len(hidden_TH)].copy_(hidden_TH)
        left = self._forward(at) if at.replay is None or not self.replays else at.replay()
        if self._sampler is None:
            return left.hidden_TH[: padded(len(works), self._multiple)].clone()
        assert left.logits_TV is not None and left.drawn_B3 is not None
        n = len(works)
        drawn_N3 = left.drawn_B3[:n]
        if not all([request.sample.plain for request in requests]):  # noqa: C419 - twice as fast
            rows = [request.next_sample(work.pending) for work, request in zip(works, requests, strict=True)]
            if any(request.params.hosted for request in requests):
                return Launched(plan.seq, partial(_sampled, self._sampler, left.logits_TV[:n], works, rows))
            drawn_N3 = self._sampler.draw_rows(left.logits_TV[:n], rows)
            if self.newest_S is not None:
                self.newest_S.scatter_(0, at.newest_B[:n], drawn_N3[:, 2].long())
        fetched = self._fetch(drawn_N3)

        def tokens() -> list[Sampled]:
            drawn = self._sampler.tokens_of(fetched.wait(), [work.start + 1 for work in works])
            return [Sampled(work.rid, (token,)) for work, token in zip(works, drawn, strict=True)]

        return Launched(plan.seq, tokens, fetched, drawn_N3)

    @torch.inference_mode()
    def capture(self, moved: Callable[[int], None]) -> int:
        """Record the sizes that are to be captured, the largest first: smaller ones find room in its memory.

        Where none is, each runs once, so that its kernels are compiled before requests come. Returns the largest that
        is captured, 0 for none. `moved` is told each size that is done. Every rank of a stage calls it: both run the
        collectives.
        Errors: UserError where the device refuses.
        """
        for size in reversed(self._captured or self._sizes):
            at = self._at[size]
            self._fill(at, (), [])
            if not self._captured:
                self._forward(at)
                moved(size)
                continue
            try:
                at.replay = self._recorder.record(partial(self._forward, at))
            except RuntimeError as error:
                first = str(error).partition("\n")[0]
                raise UserError(
                    f"decode steps of {size} requests cannot be captured as a device graph: {first};"
                    " --graph-max-batch 0 serves without"
                ) from error
            moved(size)
        return max(self._captured, default=0)

    def _views(self, size: int) -> _Size:
        rows = padded(size, self._multiple)
        blank = _blank(size, rows)
        end = offsets([array.nbytes for array in blank])[-1]
        return _Size(size, rows, end, *views_of(self._inputs, blank))

    def _fill(self, at: _Size, works: Sequence[Work], requests: Sequence[Request]) -> None:
        """Bring a step's inputs to their places; what is beyond its requests is padding.

        Pages are brought again when one has changed, or when the rows are those of others.
        """
        n = len(works)
        arrays = _blank(at.size, at.rows)
        (
            tokens_T,
            sources_T,
            positions_T,
            kv_index_B,
            keys_B,
            _,
            contexts_B,
            slots_B,
            temperature_B,
            newest_B,
            live_1,
        ) = arrays
        live_1[0] = n
        slots = [work.slot for work in works]
        if n:
            contexts_B[:n] = [work.start for work in works]
            slots_B[:n] = slots
            newest_B[:n] = slots_B[:n]
            pending = [work.pending for work in works]
            if any(pending):
                sources_T[:n] = np.where(pending, self._first_newest + newest_B[:n], sources_T[:n])
            if not all(pending):
                tokens_T[:n] = [
                    0 if work.pending else one.output[-1] for work, one in zip(works, requests, strict=True)
                ]
            positions_T[:n] = contexts_B[:n]
            kv_index_B[:n] = self._table.places(slots_B[:n], positions_T[:n])
            temperature_B[:n] = [request.params.temperature for request in requests]
            if temperature_B.any():
                streams = np.array([request.sample.stream for request in requests], dtype=np.uint64)
                keys_B[:n] = rng.row_keys(streams, positions_T[:n].astype(np.uint64) + np.uint64(1))
        changes, placed = self._placed
        if changes == self._table.changes and placed[:n] == slots:
            self._upload.into(self._inputs, arrays)
            return
        pages_NP = self._table.pages(works)
        pages_BP = np.zeros((at.size, pages_NP.shape[1]), dtype=np.int32)
        pages_BP[:n] = pages_NP
        self._upload.into(self._inputs, [*arrays, pages_BP])
        arrived = self._inputs[at.table_start : at.table_start + pages_BP.nbytes]
        self._pages_BP[: at.size, : pages_BP.shape[1]].copy_(arrived.view(torch.int32).view(pages_BP.shape))
        self._placed = self._table.changes, slots

    def _forward(self, at: _Size) -> Left:
        """Compute a step from the static inputs alone. This is what is captured."""
        contexts, slots = self._recorder.host_copies(at.contexts_B, at.slots_B)
        sequences = Sequences(
            row_starts=tuple(range(at.size + 1)),
            contexts=contexts,
            slots=slots,
            num_recurrent=at.size,
            row_starts_B1=at.row_starts_B1,
            contexts_B=at.contexts_B,
            slots_B=at.slots_B,
            page_table_BP=self._pages_BP[: at.size],
        )
        token_ids_T = at.token_ids_T if self.newest_S is None else self._words.index_select(0, at.sources_T)
        rows = token_ids_T, at.positions_T, at.kv_index_B
        batch = ForwardBatch(*rows, sequences, self._cache, live_rows=at.live_1)
        hidden_TH = self._model.forward(batch, None if self._hidden_TH is None else self._hidden_TH[: at.rows])
        if self._sampler is None:
            return Left(hidden_TH)
        logits_TV = self._model.logits(hidden_TH)
        drawn_B3 = self._sampler.draw(logits_TV[: at.size], at.keys_B, at.temperature_B)
        if self.newest_S is not None:
            self.newest_S.scatter_(0, at.newest_B, drawn_B3[:, 2].long())
        return Left(hidden_TH, logits_TV, drawn_B3)


def _sampled(
    sampler: Sampler, logits_NV: torch.Tensor, works: Sequence[Work], rows: Sequence[SampleRow]
) -> list[Sampled]:
    drawn = sampler.sample(logits_NV, rows)
    return [
        Sampled(work.rid, (one.token,), () if one.logprob is None else (one.logprob,))
        for work, one in zip(works, drawn, strict=True)
    ]


def _blank(size: int, rows: int) -> list[Array]:
    """Return the inputs of a batch of padding, in the order of `_Size`."""
    return [
        np.zeros(rows, dtype=np.int64),
        np.arange(rows, dtype=np.int64),
        np.zeros(rows, dtype=np.int64),
        np.full(size, -1, dtype=np.int64),
        np.zeros(size, dtype=np.int64),
        np.arange(size + 1, dtype=np.int32),
        np.zeros(size, dtype=np.int32),
        np.zeros(size, dtype=np.int32),
        np.zeros(size, dtype=np.float32),
        np.zeros(size, dtype=np.int64),
        np.zeros(1, dtype=np.int32),
    ]
