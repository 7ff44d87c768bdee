"""What a worker knows of each request, and how a plan becomes the tensors of one step.

Every stage keeps the same table from the same plans. Letters: T padded rows, N real rows, B sequences, P pages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch

from rocm_serve.executor.sample_rows import SampleRow, TokenCounts
from rocm_serve.executor.step_rows import padded
from rocm_serve.executor.upload import Array, Upload
from rocm_serve.messages import NewRequest, Plan, Work
from rocm_serve.ops.batch import ForwardBatch, Sequences, StageCache
from rocm_serve.ops.replay import replay_of
from rocm_serve.types import SamplingParams

_Send = Callable[["HostRows"], ForwardBatch]
_FIRST_SIZE = (64, 64)  # slots and pages that the page table begins with; it doubles as it must


@dataclass(slots=True)
class Request:
    """One request as a worker sees it. `num_pages`: its entries in the page table."""

    prompt: tuple[int, ...]
    params: SamplingParams
    output: list[int] = field(default_factory=list)
    num_pages: int = 0
    scored: int = 1  # prompt positions whose log-prob is out; position 0 has none
    sample: SampleRow = field(init=False)  # one object for all its tokens

    def __post_init__(self) -> None:
        counts = TokenCounts(self.prompt)
        self.sample = SampleRow(self.params, 0, 0, self.prompt, self.output, counts)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)

    def rows(self, work: Work) -> Sequence[int]:
        """Tokens of the rows that `work` names: known ones of one kind, then its drafts."""
        base = len(self.prompt) if work.recurrent else 0
        source: Sequence[int] = self.output if work.recurrent else self.prompt
        start, known = work.start - base, work.num_rows - len(work.drafts)
        assert start >= 0 and start + known <= len(source), f"rows of {work} are not known tokens of its kind"
        return (*source[start : start + known], *work.drafts) if work.drafts else source[start : start + known]

    def known(self, start: int, stop: int) -> list[int]:
        """Return the tokens at positions [start, stop), as far as they are known."""
        prompt_len = len(self.prompt)
        return [*self.prompt[start:stop], *self.output[max(start - prompt_len, 0) : max(stop - prompt_len, 0)]]

    def next_sample(self, pending: int = 0) -> SampleRow:
        """Return what the sampler has to know for the next token, or the one `pending` tokens behind it."""
        self.sample.num_generated = len(self.output) + pending
        self.sample.position = len(self.prompt) + self.sample.num_generated
        return self.sample

    def next_samples(self, drafts: Sequence[int], pending: int = 0) -> list[SampleRow]:
        """Return the same for the token after each of `drafts` as well, which count as output before it."""
        first = self.next_sample(pending)
        if not drafts:
            return [first]
        rows = [SampleRow(first.params, first.position, first.num_generated, self.prompt, tuple(self.output))]
        for i in range(1, len(drafts) + 1):
            output = (*self.output, *drafts[:i]) if first.edited else ()  # read by penalties only
            rows.append(SampleRow(first.params, first.position + i, first.num_generated + i, self.prompt, output))
        return rows


class RequestTable:
    """Requests by rid and the page table by slot, kept up to date by the plans alone.

    `changes` counts: while it stays, the pages of each slot do.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._requests: dict[int, Request] = {}
        self._pages_SP = np.zeros(_FIRST_SIZE, dtype=np.int32)
        self.changes = 0

    def __getitem__(self, rid: int) -> Request:
        return self._requests[rid]

    def of(self, works: Sequence[Work]) -> list[Request]:
        """Return each work's request."""
        requests = self._requests
        return [requests[work.rid] for work in works]

    def __len__(self) -> int:
        return len(self._requests)

    def apply(self, plan: Plan) -> tuple[int, ...]:
        """Bring the table to the state in which `plan` is to run; return the slots to clear before it."""
        for rid in plan.released:
            del self._requests[rid]
        for new in plan.new:
            self._add(new)
        cleared = []
        requests, page_size = self._requests, self._page_size
        for work in plan.work:
            request = requests[work.rid]
            if work.tokens:
                request.output += work.tokens
            if work.start == 0:
                request.num_pages = 0
                cleared.append(work.slot)
            if work.new_pages:
                self._add_pages(request, work)
            end = work.start + work.num_rows
            assert work.num_rows > 0 and work.slot > 0, f"empty work or the dummy slot: {work}"
            assert end <= request.num_pages * page_size, f"{work} reaches beyond {request.num_pages} pages"
            known = len(request.prompt) + len(request.output) + len(work.drafts) + work.pending
            assert not work.samples or end == known, f"{work} samples before token {request.num_tokens}"
            assert not work.pending or (work.samples and work.num_rows == 1), (
                f"a token is pending, rows are known: {work}"
            )
            assert not work.drafts or (work.samples and work.recurrent), f"drafts behind rows that sample none: {work}"
            if work.accepted:
                assert 0 < work.accepted < len(work.tokens), f"accepted drafts are not among {work.tokens}"
                assert work.start, f"drafts accepted into a state that is cleared: {work}"
        return tuple(cleared)

    def pages(self, works: Sequence[Work]) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
        """Return the pages of each work's request, B x P, with P those of the longest; zeros or old ones beyond."""
        requests = self._requests
        widest = max([requests[work.rid].num_pages for work in works], default=0)
        pages_BP: np.ndarray[tuple[int, int], np.dtype[np.int32]] = self._pages_SP[[w.slot for w in works], :widest]
        return pages_BP

    def places(self, slots_N: Array, positions_N: Array) -> Array:
        """Return where in the pages each position of each slot is: page * page_size + offset, int64."""
        page_N, offset_N = np.divmod(positions_N, self._page_size)
        places_N: Array = self._pages_SP[slots_N, page_N].astype(np.int64) * self._page_size + offset_N
        return places_N

    def _add(self, new: NewRequest) -> None:
        assert new.rid not in self._requests, f"request {new.rid} is known already"
        assert new.prompt, f"request {new.rid} has no prompt"
        self._requests[new.rid] = Request(new.prompt, new.params)

    def _add_pages(self, request: Request, work: Work) -> None:
        self.changes += 1
        first = request.num_pages
        request.num_pages = end = first + len(work.new_pages)
        slots, width = self._pages_SP.shape
        if work.slot >= slots or end > width:
            while work.slot >= slots:
                slots *= 2
            while end > width:
                width *= 2
            grown_SP = np.zeros((slots, width), dtype=np.int32)
            grown_SP[: self._pages_SP.shape[0], : self._pages_SP.shape[1]] = self._pages_SP
            self._pages_SP = grown_SP
        self._pages_SP[work.slot, first:end] = work.new_pages


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Rows of the batch that score the next token of a prompt."""

    rid: int
    first_row: int
    targets: tuple[int, ...]  # the token after each row
    alternatives: int


class SampledRows(NamedTuple):
    """Rows of the batch that draw a token: the last known one of a request, and those of its drafts behind it."""

    rid: int
    first_row: int
    drafts: tuple[int, ...] = ()
    pending: bool = False  # the row's own token is being drawn by the step before

    @property
    def rows(self) -> range:
        return range(self.first_row, self.first_row + 1 + len(self.drafts))


@dataclass(frozen=True, slots=True)
class HostRows:
    """The rows of one plan as the host lays them, one request's after the other. Padding, T - N rows, is zeros."""

    tokens_T: Array  # int64; 0 where a token is pending
    positions_T: Array  # int64
    kv_index_N: Array  # int64
    starts: tuple[int, ...]  # of each sequence's rows, and their end
    contexts: tuple[int, ...]
    slots: tuple[int, ...]
    pages_BP: Array  # int32
    recurrent: int  # sequences, which come first
    pending: tuple[tuple[int, int], ...]  # rows whose token is being drawn by the step before, and their slots

    @property
    def num_rows(self) -> int:
        return self.starts[-1]


class StepInputs:
    """One plan as tensors, and what is wanted from the rows of its result.

    `sampled`: in plan order. `rows`: as they are on the host.
    """

    def __init__(
        self, rows: HostRows, sampled: tuple[SampledRows, ...], scored: tuple[PromptRows, ...], send: _Send
    ) -> None:
        self.rows, self.sampled, self.scored = rows, sampled, scored
        self._send = send

    @cached_property
    def batch(self) -> ForwardBatch:
        """Rows and sequences on the device: they are sent when they are first asked for."""
        return self._send(self.rows)


def build_inputs(
    table: RequestTable,
    plan: Plan,
    cache: StageCache,
    device: torch.device,
    multiple: int,
    upload: Upload | None = None,
    newest_S: torch.Tensor | None = None,
) -> StepInputs:
    """Lay the rows of `plan` one after the other and pad them to a multiple of `multiple`.

    Call it once per plan, after `table.apply(plan)`: prompt rows are marked as scored. `upload`: the caller's own.
    `newest_S`: int64 on the device, the token drawn last in each slot; pending works read it there, on a stage that
    embeds tokens.
    """
    works = plan.work
    rows = _lay(table, works, cache.page_size, multiple)
    sampled = tuple(
        [
            SampledRows(work.rid, end - 1 - len(work.drafts), work.drafts, work.pending)
            for work, end in zip(works, rows.starts[1:], strict=True)
            if work.samples
        ]
    )
    scored = [_score(table[works[b].rid], works[b], rows.starts[b]) for b in range(rows.recurrent, len(works))]
    send = partial(_sent, works=works, cache=cache, upload=upload or Upload(device), newest_S=newest_S)
    return StepInputs(rows, sampled, tuple(found for found in scored if found is not None), send)


def _lay(table: RequestTable, works: Sequence[Work], page_size: int, multiple: int) -> HostRows:
    recurrent = sum([work.recurrent for work in works])
    assert all(work.recurrent for work in works[:recurrent]), "recurrent work must come first"
    counts = [work.num_rows for work in works]
    starts = tuple(accumulate(counts, initial=0))
    contexts = tuple([work.start for work in works])
    slots = tuple([work.slot for work in works])
    rows, rows_padded = starts[-1], padded(starts[-1], multiple)

    tokens_T = np.zeros(rows_padded, dtype=np.int64)
    tokens_T[:rows] = _tokens(table, works)
    positions_T = np.zeros(rows_padded, dtype=np.int64)
    positions_N = positions_T[:rows]
    sequence_N = np.arange(len(works))
    if rows == len(works):
        positions_N[:] = contexts
    else:
        sequence_N = np.repeat(sequence_N, counts)
        positions_N[:] = np.arange(rows) + np.subtract(contexts, starts[:-1])[sequence_N]
    pages_BP = table.pages(works)
    page_N, offset_N = np.divmod(positions_N, page_size)
    kv_index_N = pages_BP[sequence_N, page_N].astype(np.int64) * page_size + offset_N
    pending = tuple([(start, work.slot) for work, start in zip(works, starts, strict=False) if work.pending])
    return HostRows(tokens_T, positions_T, kv_index_N, starts, contexts, slots, pages_BP, recurrent, pending)


def _sent(
    rows: HostRows, *, works: Sequence[Work], cache: StageCache, upload: Upload, newest_S: torch.Tensor | None
) -> ForwardBatch:
    tokens_T, positions_T, kv_index_N, *of_sequences = upload(
        *(rows.tokens_T, rows.positions_T, rows.kv_index_N),
        *(np.array(values, dtype=np.int32) for values in (rows.starts, rows.contexts, rows.slots)),
        rows.pages_BP,
    )
    take_newest(tokens_T, newest_S, rows.pending, upload)
    sequences = Sequences(rows.starts, rows.contexts, rows.slots, rows.recurrent, *of_sequences)
    replay = None
    if cache.draft_tokens:
        accepted, drafts = [work.accepted for work in works], [len(work.drafts) for work in works]
        replay = replay_of(sequences, accepted, drafts, cache.draft_tokens)
    return ForwardBatch(tokens_T, positions_T, kv_index_N, sequences, cache, replay)


def take_newest(
    tokens_T: torch.Tensor, newest_S: torch.Tensor | None, pending: Sequence[tuple[int, int]], upload: Upload
) -> None:
    """Write to each of these rows the newest token of its slot. Without `newest_S` tokens are another stage's."""
    if pending and newest_S is not None:
        rows_P, slots_P = upload(*np.array(pending, dtype=np.int64).T.copy())
        tokens_T.index_copy_(0, rows_P, newest_S.index_select(0, slots_P))


def _tokens(table: RequestTable, works: Sequence[Work]) -> list[int]:
    tokens: list[int] = []
    for work in works:
        request = table[work.rid]
        if work.pending:
            tokens.append(0)
        elif work.samples and work.recurrent and work.num_rows == 1:  # its newest token, as `apply` has checked
            tokens.append(request.output[-1])
        else:
            tokens += request.rows(work)
    return tokens


def decode_batch(
    table: RequestTable,
    works: Sequence[Work],
    positions: Sequence[int],
    tokens: Sequence[int],
    cache: StageCache,
    device: torch.device,
    multiple: int,
) -> ForwardBatch:
    """Lay one row of each of these requests at the position given: steps of the draft head, which keeps KV only."""
    count = len(works)
    tokens_T = np.zeros(padded(count, multiple), dtype=np.int64)
    positions_T = np.zeros_like(tokens_T)
    tokens_T[:count], positions_T[:count] = tokens, positions
    pages_BP = table.pages(works)
    page_N, offset_N = np.divmod(positions_T[:count], cache.page_size)
    kv_index_N = pages_BP[np.arange(count), page_N].astype(np.int64) * cache.page_size + offset_N
    slots = tuple([work.slot for work in works])
    rows = Upload(device)(
        *(tokens_T, positions_T, kv_index_N, np.arange(count + 1, dtype=np.int32)),
        *(np.array(values, dtype=np.int32) for values in (positions, slots)),
        pages_BP,
    )
    sequences = Sequences(tuple(range(count + 1)), tuple(positions), slots, count, *rows[3:])
    return ForwardBatch(*rows[:3], sequences, cache)


def _score(request: Request, work: Work, first_row: int) -> PromptRows | None:
    """Name the rows of `work` (prompt rows) whose next prompt token is still to be scored, and mark them.

    A preempted request computes its prompt again but reports each position once.
    """
    if request.params.prompt_logprobs is None:
        return None
    first = max(work.start + 1, request.scored)  # positions of target tokens
    end = min(work.start + work.num_rows + 1, len(request.prompt))
    if first >= end:
        return None
    request.scored = end
    row = first_row + first - 1 - work.start
    return PromptRows(work.rid, row, request.prompt[first:end], request.params.prompt_logprobs)
