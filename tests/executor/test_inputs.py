"""The worker's table and tensors against a model of the requests kept by the test."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rocm_serve.executor.inputs import RequestTable, StepInputs, build_inputs
from rocm_serve.executor.step_rows import CPU_ROW_MULTIPLE
from rocm_serve.messages import NewRequest, Plan, Work
from rocm_serve.ops.batch import StageCache
from rocm_serve.types import SamplingParams

PAGE = 4
CPU = torch.device("cpu")
CACHE = StageCache(page_size=PAGE, k_pages={}, v_pages={}, conv={}, ssm={})


def params(prompt_logprobs: int | None = None) -> SamplingParams:
    return SamplingParams(max_tokens=100, prompt_logprobs=prompt_logprobs)


@dataclass
class Truth:
    """A request as the test knows it: every token, every page, and what the worker was told of."""

    rid: int
    prompt: tuple[int, ...]
    out: list[int] = field(default_factory=list)
    told: int = 0
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    slot: int = 0
    mentioned: bool = False

    @property
    def tokens(self) -> list[int]:
        return [*self.prompt, *self.out]


class Driver:
    """Makes random legal plans for a few requests, with preemption and release."""

    def __init__(self, data: st.DataObject) -> None:
        self.data = data
        self.alive: list[Truth] = []
        self.free_pages = list(range(64))
        self.free_slots = list(range(1, 9))
        self.released: list[int] = []
        self.next_rid = 0

    def plan(self, seq: int) -> tuple[Plan, list[tuple[Truth, Work]]]:
        draw = self.data.draw
        if len(self.alive) < 4 and (not self.alive or draw(st.booleans())):
            prompt = tuple(draw(st.lists(st.integers(0, 999), min_size=1, max_size=11)))
            self.alive.append(Truth(self.next_rid, prompt))
            self.next_rid += 1
        new: list[NewRequest] = []
        works: list[tuple[Truth, Work]] = []
        for truth in list(self.alive):
            event = draw(st.sampled_from(["run", "run", "run", "skip", "preempt", "end"]))
            if event in ("preempt", "end"):
                self.give_back(truth)
            if event == "end":
                self.alive.remove(truth)
                if truth.mentioned:
                    self.released.append(truth.rid)
            if event == "run":
                if not truth.mentioned:
                    truth.mentioned = True
                    new.append(NewRequest(truth.rid, truth.prompt, params()))
                works.append((truth, self.work(truth)))
        works.sort(key=lambda pair: not pair[1].recurrent)
        released, self.released = tuple(self.released), []
        return Plan(seq, tuple(work for _, work in works), tuple(new), released), works

    def give_back(self, truth: Truth) -> None:
        self.free_pages += truth.pages
        if truth.slot:
            self.free_slots.append(truth.slot)
        truth.pages, truth.slot, truth.computed = [], 0, 0

    def work(self, truth: Truth) -> Work:
        start = truth.computed
        if not truth.slot:
            truth.slot = self.free_slots.pop(0)
        recurrent = start >= len(truth.prompt)
        bound = len(truth.tokens) if recurrent else len(truth.prompt)
        rows = self.data.draw(st.integers(1, bound - start))
        end = start + rows
        need = -(-end // PAGE) - len(truth.pages)
        fresh = [self.free_pages.pop(0) for _ in range(max(0, need))]
        truth.pages += fresh
        samples = end == len(truth.tokens)
        work = Work(
            truth.rid, start, rows, recurrent, samples, truth.slot, tuple(fresh), tuple(truth.out[truth.told :])
        )
        truth.told, truth.computed = len(truth.out), end
        return work


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_tables_rebuilt_from_plans_equal_the_truth(data: st.DataObject) -> None:
    table = RequestTable(PAGE)
    driver = Driver(data)
    for seq in range(data.draw(st.integers(1, 25))):
        plan, works = driver.plan(seq)
        cleared = table.apply(plan)
        assert cleared == tuple(work.slot for work in plan.work if work.start == 0)
        if plan.work:
            inputs = build_inputs(table, plan, CACHE, CPU, CPU_ROW_MULTIPLE)
            check(inputs, works)
        for truth, work in works:
            if work.samples:
                truth.out.append(data.draw(st.integers(0, 999)))
    assert len(table) == sum(truth.mentioned for truth in driver.alive) + len(driver.released)


def check(inputs: StepInputs, works: list[tuple[Truth, Work]]) -> None:
    batch, sequences = inputs.batch, inputs.batch.sequences
    rows = sum(work.num_rows for _, work in works)
    assert batch.num_rows == rows and len(batch.token_ids_T) % CPU_ROW_MULTIPLE == 0
    assert 0 <= len(batch.token_ids_T) - rows < CPU_ROW_MULTIPLE
    assert not batch.token_ids_T[rows:].any() and not batch.positions_T[rows:].any()
    assert sequences.num_recurrent == sum(work.recurrent for _, work in works)
    assert sequences.contexts == tuple(work.start for _, work in works) == tuple(sequences.contexts_B.tolist())
    assert sequences.slots == tuple(truth.slot for truth, _ in works) == tuple(sequences.slots_B.tolist())
    assert sequences.row_starts == tuple(sequences.row_starts_B1.tolist())
    sampled = []
    for b, (truth, work) in enumerate(works):
        first, last = sequences.row_starts[b], sequences.row_starts[b + 1]
        positions = range(work.start, work.start + work.num_rows)
        assert batch.token_ids_T[first:last].tolist() == [truth.tokens[p] for p in positions]
        assert batch.positions_T[first:last].tolist() == list(positions)
        places = [truth.pages[p // PAGE] * PAGE + p % PAGE for p in positions]
        assert batch.kv_index_N[first:last].tolist() == places
        assert sequences.page_table_BP[b, : len(truth.pages)].tolist() == truth.pages
        if work.samples:
            sampled.append((truth.rid, last - 1, (), False))
    assert inputs.sampled == tuple(sampled)


def one(table: RequestTable, plan: Plan) -> StepInputs:
    table.apply(plan)
    return build_inputs(table, plan, CACHE, CPU, 1)


def test_prompt_rows_name_the_token_after_them_once_each() -> None:
    table = RequestTable(PAGE)
    prompt = (10, 11, 12, 13, 14)
    first = one(table, Plan(0, (Work(7, 0, 3, False, False, 1, (0,)),), (NewRequest(7, prompt, params(2)),)))
    assert [(s.first_row, s.targets, s.alternatives) for s in first.scored] == [(0, (11, 12, 13), 2)]
    last = one(table, Plan(1, (Work(7, 3, 2, False, True, 1, (1,)),)))
    assert [(s.first_row, s.targets) for s in last.scored] == [(0, (14,))]
    again = one(table, Plan(2, (Work(7, 0, 5, False, False, 2, (4, 5), tokens=(99,)),)))
    assert again.scored == ()
    decode = one(table, Plan(3, (Work(7, 5, 1, True, True, 2),)))
    assert decode.scored == () and decode.batch.token_ids_T.tolist() == [99]


def test_a_prompt_preempted_half_way_scores_only_what_is_new() -> None:
    table = RequestTable(PAGE)
    prompt = tuple(range(20, 28))
    one(table, Plan(0, (Work(1, 0, 3, False, False, 1, (0,)),), (NewRequest(1, prompt, params(0)),)))
    again = one(table, Plan(1, (Work(1, 0, 6, False, False, 3, (2, 3)),)))
    assert [(s.first_row, s.targets) for s in again.scored] == [(3, (24, 25, 26))]


def test_a_prompt_of_one_token_has_nothing_to_score() -> None:
    table = RequestTable(PAGE)
    plan = Plan(0, (Work(1, 0, 1, False, True, 1, (0,)),), (NewRequest(1, (5,), params(3)),))
    assert one(table, plan).scored == ()


NEW = (NewRequest(1, (1, 2, 3), params()),)


@pytest.mark.parametrize(
    ("plan", "sentence"),
    [
        (Plan(0, (Work(1, 0, 3, False, False, 1, ()),), (NewRequest(1, (1, 2, 3), params()),)), "beyond 0 pages"),
        (Plan(0, (Work(1, 0, 2, False, True, 1, (0,)),), (NewRequest(1, (1, 2, 3), params()),)), "samples before"),
        (Plan(0, (Work(1, 0, 3, False, True, 0, (0,)),), (NewRequest(1, (1, 2, 3), params()),)), "dummy slot"),
        (Plan(0, (), (NewRequest(1, (), params()),)), "no prompt"),
        (Plan(0, (Work(1, 0, 3, False, True, 1, (0,), drafts=(4,)),), NEW), "samples before"),
        (Plan(0, (Work(1, 0, 4, False, True, 1, (0,), drafts=(4,)),), NEW), "rows that sample none"),
        (Plan(0, (Work(1, 3, 2, True, False, 1, (0, 1), (9, 9), drafts=(4,)),), NEW), "rows that sample none"),
        (Plan(0, (Work(1, 3, 1, True, False, 1, (0,), (9, 9), 2),), NEW), "not among"),
        (Plan(0, (Work(1, 3, 1, True, False, 1, (0,), (), 1),), NEW), "not among"),
        (Plan(0, (Work(1, 0, 1, False, False, 1, (0,), (9, 9), 1),), NEW), "a state that is cleared"),
    ],
)
def test_a_plan_that_cannot_be_meant_is_refused(plan: Plan, sentence: str) -> None:
    with pytest.raises(AssertionError, match=sentence):
        RequestTable(PAGE).apply(plan)


def test_a_request_cannot_be_introduced_twice() -> None:
    table = RequestTable(PAGE)
    table.apply(Plan(0, (), (NewRequest(1, (1,), params()),)))
    with pytest.raises(AssertionError, match="known already"):
        table.apply(Plan(1, (), (NewRequest(1, (1,), params()),)))


def test_the_page_table_grows_with_slots_and_pages() -> None:
    table = RequestTable(PAGE)
    short, long = tuple(range(3)), tuple(range(100 * PAGE))
    table.apply(Plan(0, (Work(1, 0, 3, False, False, 2, (7,)),), (NewRequest(1, short, params()),)))
    news = (NewRequest(2, long, params()),)
    pages = tuple(range(1000, 1100))
    works = (Work(1, 0, 3, False, True, 2, (7,)), Work(2, 0, len(long), False, True, 300, pages))
    inputs = one(table, Plan(1, works, news))
    table_BP = inputs.batch.sequences.page_table_BP
    assert table_BP.shape == (2, 100) and table_BP.dtype == torch.int32
    assert table_BP[0, 0] == 7 and table_BP[1].tolist() == list(pages)
    assert inputs.batch.kv_index_N.tolist()[-1] == 1099 * PAGE + PAGE - 1
