"""One scene for each rare state and each rule, with numbers that a reader can check by hand."""

from __future__ import annotations

from collections import deque

import pytest

from rocm_serve.engine.scheduler import Scheduler
from rocm_serve.messages import AddRequest, EffectiveLimits, Output, Plan, Sampled, StepResult, Work
from rocm_serve.types import FinishReason, SamplingParams, TokenLogprob
from tests.engine.simulation import FakeWorker, alone, make_limits, make_prompt


class Stage:
    """A scheduler, a worker, and hands to move them one step at a time."""

    def __init__(self, limits: EffectiveLimits, depth: int = 1) -> None:
        self.limits = limits
        self.scheduler = Scheduler(limits, depth)
        self.worker = FakeWorker(limits)
        self.results: deque[StepResult] = deque()
        self.outputs: dict[str, list[Output]] = {}

    def add(self, name: str, length: int, **params: object) -> AddRequest:
        request = AddRequest(name, make_prompt(len(name) + length, length), SamplingParams(**params))  # type: ignore[arg-type]
        self.scheduler.add(request)
        self.outputs[name] = []
        return request

    def plan(self) -> Plan:
        plan = self.scheduler.schedule()
        self.scheduler.check()
        assert plan is not None
        self.results.append(self.worker.execute(plan))
        return plan

    def commit(self) -> list[Output]:
        outputs = self.scheduler.commit(self.results.popleft())
        self.scheduler.check()
        for output in outputs:
            self.outputs[output.request_id].append(output)
        return outputs

    def finish(self) -> list[Plan]:
        plans = []
        while not self.scheduler.idle:
            while (plan := self.scheduler.schedule()) is not None:
                plans.append(plan)
                self.results.append(self.worker.execute(plan))
            self.commit()
        return plans

    def tokens(self, name: str) -> list[int]:
        return [token for output in self.outputs[name] for token in output.tokens]

    def reason(self, name: str) -> FinishReason | None:
        return self.outputs[name][-1].finish_reason


def rows(plan: Plan) -> list[tuple[int, int, int]]:
    return [(work.rid, work.start, work.num_rows) for work in plan.work]


def end_token(request: AddRequest, limits: EffectiveLimits, number: int) -> int:
    """The token that comes out at place `number` (from 1), if it is new there: then it can serve as a stop id."""
    tokens = alone(request.prompt, SamplingParams(max_tokens=number), limits).tokens
    assert tokens.index(tokens[-1]) == number - 1, "choose another prompt"
    return tokens[-1]


def test_pool_too_small_preempts_the_newest_which_resumes_first_and_loses_nothing() -> None:
    stage = Stage(make_limits(num_pages=4, page_size=4, max_running_requests=2))
    requests = [stage.add("a", 3, max_tokens=12), stage.add("b", 3, max_tokens=12), stage.add("c", 2, max_tokens=2)]
    plans = stage.finish()
    started = [(work.rid, work.start) for plan in plans for work in plan.work if work.start == 0]
    assert started == [(0, 0), (1, 0), (1, 0), (2, 0)], "b gave way, and came again before c started"
    assert stage.scheduler.stats().preemptions == 1
    again = [work for plan in plans for work in plan.work if work.rid == 1]
    resumed = next(number for number, work in enumerate(again) if number and work.start == 0)
    prompt, output = again[resumed : resumed + 2]
    assert (prompt.num_rows, prompt.recurrent, prompt.samples) == (3, False, False)
    assert (output.start, output.recurrent, output.samples) == (3, True, True) and output.num_rows > 1
    for request in requests:
        assert stage.tokens(request.request_id) == alone(request.prompt, request.params, stage.limits).tokens


def test_equal_events_give_equal_plans_down_to_the_page_numbers() -> None:
    def play() -> list[Plan]:
        stage = Stage(make_limits(num_pages=12, page_size=2, max_running_requests=3), depth=2)
        for number, name in enumerate(("a", "bb", "ccc", "dddd")):
            stage.add(name, 3 + number, max_tokens=12)
        return stage.finish()

    assert play() == play() and len(play()) > 12


def two_in_flight(depth: int = 2) -> Stage:
    """b's decode row is in flight when a needs a page and none is free. Six pages of two tokens."""
    stage = Stage(make_limits(num_pages=6, page_size=2, max_running_requests=2), depth)
    stage.add("a", 2, max_tokens=9)
    stage.add("b", 2, max_tokens=9)
    stage.plan()
    stage.commit()
    return stage


def run_until_victim_in_flight(stage: Stage) -> Plan:
    """Depth 2, one plan always left in flight. Return the plan for which b was preempted while in flight."""
    stage.plan()
    while True:
        plan = stage.plan()
        b = [r for r in stage.scheduler.held.waiting if r.in_flight]
        if b:
            assert [r.request_id for r in b] == ["b"]
            return plan
        stage.commit()


def test_the_token_of_a_victim_in_flight_is_kept() -> None:
    stage = two_in_flight()
    run_until_victim_in_flight(stage)
    before = len(stage.tokens("b"))
    while len(stage.tokens("b")) == before:
        assert "b" in [r.request_id for r in stage.scheduler.held.waiting]
        stage.commit()
    stage.finish()
    for name in "ab":
        prompt = make_prompt(3, 2)
        assert stage.tokens(name) == alone(prompt, SamplingParams(max_tokens=9), stage.limits).tokens


def test_a_victim_in_flight_is_not_resumed_before_its_token_is_known() -> None:
    stage = two_in_flight(depth=3)
    run_until_victim_in_flight(stage)
    stage.scheduler.abort(("a",))
    (b,) = stage.scheduler.held.waiting
    assert b.in_flight and stage.scheduler.stats().pages_used == 0 and len(stage.results) == 2
    assert stage.scheduler.schedule() is None, "a plan may go out, all pages are free, and yet b must wait"
    stage.finish()
    assert stage.tokens("b") == alone(make_prompt(3, 2), b.params, stage.limits).tokens


def test_a_victim_in_flight_whose_token_ends_it_never_resumes() -> None:
    probe = two_in_flight()
    run_until_victim_in_flight(probe)
    number = len(probe.tokens("b")) + 1
    request = AddRequest("b", make_prompt(3, 2), SamplingParams(max_tokens=9))
    stage = Stage(probe.limits, depth=2)
    stage.add("a", 2, max_tokens=9)
    stage.add("b", 2, max_tokens=number)
    stage.plan()
    stage.commit()
    run_until_victim_in_flight(stage)
    plans = stage.finish()
    assert not [work for plan in plans for work in plan.work if work.rid == 1], "computed again for nothing"
    assert stage.reason("b") is FinishReason.LENGTH
    assert stage.tokens("b") == alone(request.prompt, request.params, stage.limits).tokens[:number]


def test_abort_in_flight_drops_the_result_and_releases_once() -> None:
    stage = Stage(make_limits(), depth=2)
    stage.add("a", 4, max_tokens=20)
    stage.add("b", 4, max_tokens=20)
    stage.plan()
    stage.scheduler.abort(("b", "nobody"))
    stage.scheduler.check()
    assert stage.scheduler.stats().slots_used == 1
    assert [output.request_id for output in stage.commit()] == ["a"]
    plans = stage.finish()
    assert [plan.released for plan in plans if plan.released] == [(1,)] and plans[0].released == (1,)
    assert stage.outputs["b"] == [] and stage.scheduler.stats().aborted == 1


def test_abort_of_a_request_that_no_plan_has_named_is_not_told_to_workers() -> None:
    stage = Stage(make_limits(max_running_requests=1))
    stage.add("a", 4, max_tokens=3)
    stage.add("b", 4, max_tokens=3)
    stage.plan()
    stage.scheduler.abort(("b",))
    stage.commit()
    assert all(plan.released == () for plan in stage.finish())


def test_after_the_last_request_the_release_waits_for_the_next_plan() -> None:
    stage = Stage(make_limits())
    stage.add("a", 4, max_tokens=1)
    stage.finish()
    assert stage.scheduler.idle and stage.scheduler.schedule() is None
    stage.add("b", 4, max_tokens=1)
    assert stage.plan().released == (0,)


@pytest.mark.parametrize(("depth", "count", "sizes"), [(2, 32, [16, 16]), (2, 33, [16, 17]), (3, 10, [3, 3, 4])])
def test_decoding_requests_are_split_evenly_over_the_plans_in_flight(depth: int, count: int, sizes: list[int]) -> None:
    stage = Stage(make_limits(max_running_requests=count, num_pages=2000, chunked_prefill_size=512), depth)
    for number in range(count):
        stage.add(f"r{number:02}", 5, max_tokens=60)
    stage.plan()
    stage.commit()
    for _ in range(depth):
        stage.plan()
    for _ in range(30):
        assert sorted(len(record.plan.work) for record in stage.scheduler.in_flight) == sizes
        stage.commit()
        stage.plan()


def test_groups_are_evened_out_within_one_round_when_requests_leave_and_come() -> None:
    stage = Stage(make_limits(max_running_requests=64, num_pages=2000, chunked_prefill_size=512), depth=2)
    for number in range(32):
        stage.add(f"r{number:02}", 5, max_tokens=100)
    stage.plan()
    stage.commit()
    stage.plan()
    first = stage.plan()
    leaving = [f"r{work.rid:02}" for work in first.work[:9]]
    stage.scheduler.abort(leaving)
    for _ in range(2):
        stage.commit()
        stage.plan()
    assert sorted(len(record.plan.work) for record in stage.scheduler.in_flight) == [11, 12]
    for number in range(40, 50):
        stage.add(f"r{number}", 5, max_tokens=100)
    for _ in range(4):
        stage.commit()
        stage.plan()
    assert sorted(len(record.plan.work) for record in stage.scheduler.in_flight) == [16, 17]


def test_a_lone_request_decodes_whenever_its_result_is_back() -> None:
    stage = Stage(make_limits(), depth=2)
    stage.add("a", 5, max_tokens=4)
    assert rows(stage.plan()) == [(0, 0, 5)]
    for position in (5, 6, 7):
        assert stage.scheduler.schedule() is None
        stage.commit()
        assert rows(stage.plan()) == [(0, position, 1)]


def test_prompt_chunks_follow_in_consecutive_plans_without_a_result() -> None:
    stage = Stage(make_limits(chunked_prefill_size=64), depth=3)
    stage.add("a", 150, max_tokens=4)
    assert [rows(stage.plan()) for _ in range(3)] == [[(0, 0, 64)], [(0, 64, 64)], [(0, 128, 22)]]
    assert stage.scheduler.schedule() is None


def test_decode_rows_do_not_count_against_the_prompt_budget() -> None:
    stage = Stage(make_limits(chunked_prefill_size=4))
    stage.add("a", 4, max_tokens=9)
    stage.plan()
    stage.commit()
    stage.add("b", 9, max_tokens=9)
    assert rows(stage.plan()) == [(0, 4, 1), (1, 0, 4)]


def test_what_is_left_of_the_budget_serves_a_prompt_that_ends_in_it() -> None:
    stage = Stage(make_limits(chunked_prefill_size=100))
    stage.add("a", 70, max_tokens=1)
    stage.add("b", 30, max_tokens=1)
    stage.add("c", 65, max_tokens=1)
    assert rows(stage.plan()) == [(0, 0, 70), (1, 0, 30)]
    stage.commit()
    assert rows(stage.plan()) == [(2, 0, 65)]


def test_a_running_prompt_and_a_new_one_share_the_budget() -> None:
    stage = Stage(make_limits(chunked_prefill_size=192, max_model_len=512, num_pages=200))
    stage.add("a", 300, max_tokens=1)
    stage.add("b", 300, max_tokens=1)
    plans = []
    while not stage.scheduler.idle:
        plans.append(rows(stage.plan()))
        stage.commit()
    assert plans == [[(0, 0, 192)], [(0, 192, 108), (1, 0, 64)], [(1, 64, 192)], [(1, 256, 44)]]


@pytest.mark.parametrize(
    ("chunk", "starts"),
    [(512, [0]), (100, [0, 64]), (64, [0, 64, 128]), (63, [0, 63, 126]), (40, [0, 40, 80, 120])],
)
def test_prompts_are_cut_at_multiples_of_64_or_of_a_smaller_chunk(chunk: int, starts: list[int]) -> None:
    stage = Stage(make_limits(chunked_prefill_size=chunk))
    stage.add("a", 150, max_tokens=1)
    assert [work.start for plan in stage.finish() for work in plan.work] == starts


def test_prompt_scores_of_a_preempted_request_are_delivered_once() -> None:
    stage = Stage(make_limits(num_pages=4, page_size=4, max_running_requests=2))
    for name in "ab":
        stage.add(name, 3, max_tokens=12, prompt_logprobs=0)
    stage.finish()
    assert stage.scheduler.stats().preemptions == 1
    for name in "ab":
        got = [one for output in stage.outputs[name] for one in output.prompt_logprobs]
        prompt, params = make_prompt(4, 3), SamplingParams(max_tokens=12, prompt_logprobs=0)
        assert got == alone(prompt, params, stage.limits).prompt_logprobs and len(got) == 2


def test_the_head_of_the_queue_is_not_overtaken() -> None:
    stage = Stage(make_limits(num_pages=10, page_size=4))
    stage.add("a", 20, max_tokens=4)
    stage.add("big", 24, max_tokens=4)
    stage.add("c", 1, max_tokens=1)
    plans = stage.finish()
    firsts = [work.rid for plan in plans for work in plan.work if work.start == 0]
    assert firsts == [0, 1, 2]


def test_admission_leaves_one_page_of_growth_for_each_running_request() -> None:
    for together in (True, False):
        stage = Stage(make_limits(num_pages=4, page_size=4))
        stage.add("a", 4, max_tokens=8)
        if together:
            stage.add("b", 12, max_tokens=2)
        assert rows(stage.plan()) == [(0, 0, 4)], "b's three pages would take a's next one"
        stage.commit()
        if not together:
            stage.add("b", 8, max_tokens=2)
        assert rows(stage.plan()) == [(0, 4, 1)], "two pages are free, and one is for a's growth"
        stage.commit()
        stage.finish()
        assert stage.scheduler.stats().preemptions == 0


def test_max_tokens_zero_scores_the_prompt_and_samples_nothing() -> None:
    stage = Stage(make_limits(chunked_prefill_size=4))
    request = stage.add("a", 9, max_tokens=0, prompt_logprobs=0)
    plans = stage.finish()
    assert not any(work.samples for plan in plans for work in plan.work)
    scores = [len(output.prompt_logprobs) for output in stage.outputs["a"]]
    assert scores == [4, 4, 0]
    got = [one for output in stage.outputs["a"] for one in output.prompt_logprobs]
    assert got == alone(request.prompt, request.params, stage.limits).prompt_logprobs
    assert stage.reason("a") is FinishReason.LENGTH and stage.tokens("a") == []


def test_an_end_token_counts_only_after_min_tokens() -> None:
    limits = make_limits()
    request = AddRequest("a", make_prompt(6, 5), SamplingParams(max_tokens=3))
    token = end_token(request, limits, 3)
    for min_tokens, reason, stop in ((2, FinishReason.STOP, token), (3, FinishReason.LENGTH, None)):
        stage = Stage(limits)
        stage.add("a", 5, max_tokens=5 if stop is None else 3, min_tokens=min_tokens, eos_token_ids=(token,))
        stage.finish()
        if stop is None:
            assert len(stage.tokens("a")) > 3, "an EOS among the first min_tokens ends nothing"
        else:
            last = stage.outputs["a"][-1]
            assert (last.finish_reason, last.stop_token, last.tokens) == (reason, token, (token,))


def test_a_stop_id_that_is_the_last_allowed_token_is_a_stop() -> None:
    limits = make_limits()
    request = AddRequest("a", make_prompt(6, 5), SamplingParams(max_tokens=3))
    stage = Stage(limits)
    stage.add("a", 5, max_tokens=3, stop_token_ids=(end_token(request, limits, 3),))
    stage.finish()
    assert stage.reason("a") is FinishReason.STOP


def test_a_full_context_ends_with_length() -> None:
    stage = Stage(make_limits(max_model_len=16, num_pages=4, page_size=4))
    stage.add("a", 10, max_tokens=100)
    stage.finish()
    assert len(stage.tokens("a")) == 6 and stage.reason("a") is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("length", "max_tokens", "sentence"),
    [
        (0, 1, "the prompt is empty"),
        (33, 0, "at most 32 fit"),
        (32, 1, "at most 31 fit"),
        (10, 16, "can need 7 cache pages of 4 tokens; this server has 6"),
    ],
)
def test_a_request_that_can_never_run_is_refused_with_the_reason(length: int, max_tokens: int, sentence: str) -> None:
    stage = Stage(make_limits(max_model_len=32, num_pages=6, page_size=4))
    with pytest.raises(ValueError, match=sentence):
        stage.add("a", length, max_tokens=max_tokens)
    assert stage.scheduler.idle


def test_the_largest_request_that_is_not_refused_runs_to_its_end() -> None:
    stage = Stage(make_limits(max_model_len=32, num_pages=6, page_size=4))
    stage.add("a", 10, max_tokens=15)
    stage.finish()
    assert len(stage.tokens("a")) == 15 and stage.scheduler.stats().peak_running == 1


def test_an_id_in_use_is_refused() -> None:
    stage = Stage(make_limits())
    stage.add("a", 3, max_tokens=1)
    with pytest.raises(ValueError, match="already in use"):
        stage.add("a", 3, max_tokens=1)


def test_slots_and_max_running_requests_both_bound_who_runs() -> None:
    for limits in (make_limits(max_running_requests=3), make_limits(max_running_requests=8, num_slots=3)):
        stage = Stage(limits)
        for name in "abcde":
            stage.add(name, 3, max_tokens=3)
        plan = stage.plan()
        assert sorted(work.slot for work in plan.work) == [1, 2, 3]
        assert stage.scheduler.stats().slots_total == 3


def test_stats_tell_what_kind_each_step_was() -> None:
    stage = Stage(make_limits(chunked_prefill_size=4))
    stage.add("a", 4, max_tokens=3)
    stage.plan()
    stage.commit()
    stage.add("b", 4, max_tokens=1)
    stage.finish()
    stats = stage.scheduler.stats()
    assert (stats.prefill_steps, stats.mixed_steps, stats.decode_steps, stats.steps) == (1, 1, 1, 3)
    assert (stats.prompt_tokens, stats.generation_tokens, stats.finished, stats.peak_running) == (8, 4, 2, 2)


ONE = TokenLogprob(1, -0.5)


@pytest.mark.parametrize(
    "result",
    [
        StepResult(1, (Sampled(0, (1,), (ONE,), (ONE, ONE)),)),
        StepResult(0, ()),
        StepResult(0, (Sampled(0, (1, 2), (ONE,), (ONE, ONE)),)),
        StepResult(0, (Sampled(0, (1,), (), (ONE, ONE)),)),
        StepResult(0, (Sampled(0, (1,), (ONE,), (ONE,)),)),
        StepResult(0, (Sampled(0, (1,), (ONE,), (ONE, ONE)), Sampled(5, (1,)))),
    ],
    ids=["wrong step", "no token", "two tokens", "log-prob missing", "prompt score missing", "stranger"],
)
def test_a_result_that_does_not_fit_its_plan_is_our_mistake(result: StepResult) -> None:
    scheduler = Scheduler(make_limits(), 1)
    scheduler.add(AddRequest("a", (1, 2, 3), SamplingParams(max_tokens=5, logprobs=0, prompt_logprobs=0)))
    scheduler.schedule()
    with pytest.raises(AssertionError):
        scheduler.commit(result)


def test_a_plan_carries_only_what_is_new() -> None:
    stage = Stage(make_limits(page_size=4))
    request = stage.add("a", 4, max_tokens=9)
    first = stage.plan()
    assert [new.prompt for new in first.new] == [request.prompt] and first.work[0].new_pages == (0,)
    stage.commit()
    token = stage.tokens("a")[-1]
    assert stage.plan().work == (Work(0, 4, 1, True, True, 1, (1,), (token,)),)
    stage.commit()
    token = stage.tokens("a")[-1]
    plan = stage.plan()
    assert plan.new == () and plan.work == (Work(0, 5, 1, True, True, 1, (), (token,)),)
