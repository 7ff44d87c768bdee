"""What a worker knows of each request, and how a plan becomes the tensors of one step.

Every stage keeps the same table from the same plans. Letters: T padded rows, N real rows, B sequences, P pages.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch

from rocm_serve.executor.memory import padded
from rocm_serve.executor.sampler import TokenCounts
from rocm_serve.messages import NewRequest, Plan, Work
from rocm_serve.ops.batch import ForwardBatch, Sequences, StageCache
from rocm_serve.types import SamplingParams


@dataclass(slots=True)
class Request:
    """One request as a worker sees it."""

    prompt: tuple[int, ...]
    params: SamplingParams
    output: list[int] = field(default_factory=list)
    pages: array[int] = field(default_factory=lambda: array("i"))
    scored: int = 1  # prompt positions whose log-prob is out; position 0 has none
    counts: TokenCounts = field(init=False)

    def __post_init__(self) -> None:
        self.counts = TokenCounts(self.prompt)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)

    def rows(self, work: Work) -> Sequence[int]:
        """Tokens of the rows that `work` names."""
        base = len(self.prompt) if work.recurrent else 0
        source: Sequence[int] = self.output if work.recurrent else self.prompt
        start = work.start - base
        assert start >= 0 and start + work.num_rows <= len(source), f"rows of {work} are not known tokens of its kind"
        return source[start : start + work.num_rows]


class RequestTable:
    """Requests by rid, kept up to date by the plans alone."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._requests: dict[int, Request] = {}

    def __getitem__(self, rid: int) -> Request:
        return self._requests[rid]

    def __len__(self) -> int:
        return len(self._requests)

    def apply(self, plan: Plan) -> tuple[int, ...]:
        """Bring the table to the state in which `plan` is to run; return the slots to clear before it."""
        for rid in plan.released:
            del self._requests[rid]
        for new in plan.new:
            self._add(new)
        cleared = []
        for work in plan.work:
            request = self._requests[work.rid]
            request.output += work.tokens
            if work.start == 0:
                del request.pages[:]
                cleared.append(work.slot)
            request.pages.extend(work.new_pages)
            self._check(request, work)
        return tuple(cleared)

    def _add(self, new: NewRequest) -> None:
        assert new.rid not in self._requests, f"request {new.rid} is known already"
        assert new.prompt, f"request {new.rid} has no prompt"
        self._requests[new.rid] = Request(new.prompt, new.params)

    def _check(self, request: Request, work: Work) -> None:
        end = work.start + work.num_rows
        assert work.num_rows > 0 and work.slot > 0, f"empty work or the dummy slot: {work}"
        assert end <= len(request.pages) * self._page_size, f"{work} reaches beyond {len(request.pages)} pages"
        assert not work.samples or end == request.num_tokens, f"{work} samples before token {request.num_tokens}"


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Rows of the batch that score the next token of a prompt."""

    rid: int
    first_row: int
    targets: tuple[int, ...]  # the token after each row
    alternatives: int


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One plan as tensors, and what is wanted from the rows of its result."""

    batch: ForwardBatch
    sampled: tuple[tuple[int, int], ...]  # (rid, row of the batch) in plan order
    scored: tuple[PromptRows, ...]


def build_inputs(table: RequestTable, plan: Plan, cache: StageCache, device: torch.device, multiple: int) -> StepInputs:
    """Lay the rows of `plan` one after the other and pad them to a multiple of `multiple`.

    Call it once per plan, after `table.apply(plan)`: prompt rows are marked as scored.
    """
    works = plan.work
    recurrent = sum(work.recurrent for work in works)
    assert all(work.recurrent for work in works[:recurrent]), "recurrent work must come first"
    starts = tuple(accumulate((work.num_rows for work in works), initial=0))
    contexts = tuple(work.start for work in works)
    slots = tuple(work.slot for work in works)
    rows, rows_padded = starts[-1], padded(starts[-1], multiple)

    tokens_T = torch.zeros(rows_padded, dtype=torch.int64)
    positions_T = torch.zeros(rows_padded, dtype=torch.int64)
    kv_index_N = torch.empty(rows, dtype=torch.int64)
    widest = max((len(table[work.rid].pages) for work in works), default=0)
    pages_BP = torch.zeros((len(works), widest), dtype=torch.int32)
    page_size = cache.page_size
    for b, work in enumerate(works):
        request = table[work.rid]
        own = slice(starts[b], starts[b + 1])
        tokens_T[own] = torch.tensor(request.rows(work), dtype=torch.int64)
        positions = torch.arange(work.start, work.start + work.num_rows)
        positions_T[own] = positions
        pages = torch.tensor(request.pages, dtype=torch.int32)
        pages_BP[b, : len(pages)] = pages
        kv_index_N[own] = pages[positions // page_size].long() * page_size + positions % page_size

    sequences = Sequences(
        row_starts=starts,
        contexts=contexts,
        slots=slots,
        num_recurrent=recurrent,
        row_starts_B1=torch.tensor(starts, dtype=torch.int32).to(device),
        contexts_B=torch.tensor(contexts, dtype=torch.int32).to(device),
        slots_B=torch.tensor(slots, dtype=torch.int32).to(device),
        page_table_BP=pages_BP.to(device),
    )
    batch = ForwardBatch(tokens_T.to(device), positions_T.to(device), kv_index_N.to(device), sequences, cache)
    sampled = tuple((work.rid, starts[b + 1] - 1) for b, work in enumerate(works) if work.samples)
    scored = [_score(table[work.rid], work, starts[b]) for b, work in enumerate(works)]
    return StepInputs(batch, sampled, tuple(rows for rows in scored if rows is not None))


def _score(request: Request, work: Work, first_row: int) -> PromptRows | None:
    """Name the rows of `work` whose next prompt token is still to be scored, and mark them.

    A preempted request computes its prompt again but reports each position once.
    """
    if request.params.prompt_logprobs is None or work.recurrent:
        return None
    first = max(work.start + 1, request.scored)  # positions of target tokens
    end = min(work.start + work.num_rows + 1, len(request.prompt))
    if first >= end:
        return None
    request.scored = end
    row = first_row + first - 1 - work.start
    return PromptRows(work.rid, row, request.prompt[first:end], request.params.prompt_logprobs)
