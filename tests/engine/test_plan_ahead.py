"""Steps that are planned before the tokens of those before them are known: scenes to be checked by hand."""

from __future__ import annotations

import pytest

from rocm_serve.engine.core import EngineCore
from rocm_serve.messages import CoreFailed, Drain, EffectiveLimits, Outputs, Plan, Work
from rocm_serve.types import FinishReason
from tests.engine.simulation import FakeExecutor, alone, make_limits, make_request
from tests.engine.test_core_loop import Inbox
from tests.engine.test_scheduler_scenarios import Stage, end_token


def limits(**changes: int) -> EffectiveLimits:
    return make_limits(plan_ahead=True, **changes)


def shown(plan: Plan) -> list[tuple[int, int, bool, int]]:
    """Say of each work its request, first row, whether its token is on its way, and how many tokens it brings."""
    return [(work.rid, work.start, work.pending, len(work.tokens)) for work in plan.work]


def test_a_row_is_planned_behind_the_prompt_and_none_behind_the_length() -> None:
    stage = Stage(limits(), 2)
    request = stage.add("a", 3, max_tokens=3)
    assert shown(stage.plan()) == [(0, 0, False, 0)]
    assert shown(stage.plan()) == [(0, 3, True, 0)]
    assert stage.scheduler.schedule() is None, "two steps are in flight"
    stage.commit()
    assert shown(stage.plan()) == [(0, 4, True, 1)], "the host's token comes a step behind"
    stage.commit()
    assert stage.scheduler.schedule() is None, "its last token is being drawn"
    stage.commit()
    assert stage.tokens("a") == alone(request.prompt, request.params, stage.limits).tokens
    assert stage.reason("a") is FinishReason.LENGTH and stage.scheduler.idle


def test_an_end_token_is_seen_a_step_late_and_what_was_drawn_behind_it_is_dropped() -> None:
    stage = Stage(limits(), 2)
    probe = make_request("abc", 9, seed=12, max_tokens=1)
    end = end_token(probe, stage.limits, 2)
    stage.add("abc", 9, max_tokens=9, stop_token_ids=(end,))
    for _ in range(2):
        stage.plan()
    stage.commit()
    stage.plan()
    (over,) = stage.commit()
    assert over.finish_reason is FinishReason.STOP and over.tokens == (end,)
    stats = stage.scheduler.stats()
    assert (stats.running, stats.pages_used, stats.slots_used) == (0, 0, 0), "given back at once"
    assert len(stage.scheduler.in_flight) == 1 and not stage.scheduler.idle
    assert stage.commit() == [] and stage.scheduler.idle
    assert stage.scheduler.stats().generation_tokens == 2


def test_slot_and_pages_of_an_ended_request_have_their_next_owner_in_the_plan_behind_its_last_row() -> None:
    stage = Stage(limits(num_pages=3, page_size=4, max_running_requests=1), 2)
    probe = make_request("abc", 9, seed=12, max_tokens=1)
    end = end_token(probe, stage.limits, 1)
    stage.add("abc", 9, max_tokens=2, stop_token_ids=(end,))
    later = stage.add("b", 9, max_tokens=3)
    first = stage.plan()
    wasted = stage.plan()
    stage.commit()
    second = stage.plan()
    assert second.seq == wasted.seq + 1 and wasted.work[0].pending
    assert second.work[0].slot == first.work[0].slot
    assert set(second.work[0].new_pages) & set(first.work[0].new_pages + wasted.work[0].new_pages)
    stage.finish()
    assert stage.tokens("b") == alone(later.prompt, later.params, stage.limits).tokens


def test_all_decode_in_every_step_and_new_ones_join() -> None:
    stage = Stage(limits(max_running_requests=4), 2)
    for name in "abcd":
        stage.add(name, 2, max_tokens=8)
    plans = stage.finish()
    assert [len(plan.work) for plan in plans] == [4] * 8
    assert all(work.pending for plan in plans[1:] for work in plan.work)
    stage.add("e", 2, max_tokens=6)
    stage.plan()
    stage.add("f", 3, max_tokens=2)
    joined = stage.plan()
    assert [(work.pending, work.recurrent) for work in joined.work] == [(True, True), (False, False)]
    stage.commit()
    assert [work.pending for work in stage.plan().work] == [True, True]


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs", "min_tokens", "presence_penalty"])
def test_nothing_is_planned_behind_a_step_that_needs_the_host(field: str) -> None:
    stage = Stage(limits(), 2)
    stage.add("plain", 2, max_tokens=12)
    stage.plan()
    stage.add("hosted", 2, max_tokens=3, **{field: 1})
    both = stage.plan()
    assert [work.rid for work in both.work] == [0, 1]
    stage.commit()
    assert stage.scheduler.schedule() is None
    stage.commit()
    alternately: list[Work] = []
    while stage.scheduler.running[0].out[-1:] and len(stage.scheduler.running) == 2:
        plan = stage.plan()
        assert len(plan.work) == 2 and stage.scheduler.schedule() is None
        alternately += plan.work
        stage.commit()
    assert len(alternately) == 4 and not any(work.pending for work in alternately)
    assert [work.pending for plan in (stage.plan(), stage.plan()) for work in plan.work] == [False, True]


def test_an_abort_with_two_steps_in_flight_drops_both_tokens() -> None:
    stage = Stage(limits(), 2)
    stage.add("a", 2, max_tokens=9)
    stage.add("b", 2, max_tokens=9)
    stage.plan()
    stage.plan()
    stage.scheduler.abort(["a"])
    stage.scheduler.check()
    assert [output.request_id for output in stage.commit()] == ["b"]
    assert [output.request_id for output in stage.commit()] == ["b"]
    (plan,) = [stage.plan()]
    assert plan.released == (0,) and [work.rid for work in plan.work] == [1]


def test_with_stages_the_next_plan_of_the_oldest_group_is_in_flight_beside_the_present_ones() -> None:
    stage = Stage(limits(max_running_requests=5), 3)  # two stages
    asked = [stage.add(name, 2, max_tokens=8) for name in "abcd"]
    assert shown(stage.plan()) == [(rid, 0, False, 0) for rid in range(4)]
    assert shown(stage.plan()) == [(0, 2, True, 0), (1, 2, True, 0)], "a plan that would be empty"
    assert shown(stage.plan()) == [(2, 2, True, 0), (3, 2, True, 0)]
    assert stage.scheduler.schedule() is None, "three plans are in flight"
    stage.commit()
    assert shown(stage.plan()) == [(0, 3, True, 1), (1, 3, True, 1)]
    stage.commit()
    stage.add("e", 2, max_tokens=4)
    assert shown(stage.plan()) == [(2, 3, True, 1), (3, 3, True, 1), (4, 0, False, 0)]
    plans = stage.finish()
    assert [len(plan.work) for plan in plans[:6]] == [2, 3, 2, 3, 2, 3], "even groups, never one of a plan just before"
    for request in asked:
        assert stage.tokens(request.request_id) == alone(request.prompt, request.params, stage.limits).tokens


def test_with_stages_a_row_is_not_planned_behind_a_near_plan_while_there_is_a_prompt_to_compute() -> None:
    """The first stage would wait for the last one, and the prompt with it."""
    stage = Stage(limits(chunked_prefill_size=64), 3)
    stage.add("a", 2, max_tokens=8)
    stage.plan()
    stage.add("b", 256 - 8, max_tokens=4)
    assert shown(stage.plan()) == [(1, 0, False, 0)]
    assert shown(stage.plan()) == [(0, 2, True, 0), (1, 64, False, 0)]
    stage.commit()
    assert shown(stage.plan()) == [(1, 128, False, 0)]


def test_one_request_has_two_plans_in_flight_whatever_the_stages() -> None:
    stage = Stage(limits(), 4)
    request = stage.add("a", 2, max_tokens=5)
    assert [shown(stage.plan()), shown(stage.plan())] == [[(0, 0, False, 0)], [(0, 2, True, 0)]]
    assert stage.scheduler.schedule() is None, "two of its tokens would be unknown"
    stage.finish()
    assert stage.tokens("a") == alone(request.prompt, request.params, stage.limits).tokens


def test_with_stages_a_plan_of_the_host_makes_them_as_many_as_without() -> None:
    stage = Stage(limits(max_running_requests=4), 3)
    for name in "abc":
        stage.add(name, 2, max_tokens=9)
    stage.add("hosted", 2, max_tokens=9, logprobs=1)
    stage.plan()
    assert stage.scheduler.schedule() is None, "nothing else is ready, and the host draws"
    stage.commit()
    assert [len(stage.plan().work), len(stage.plan().work)] == [2, 2]
    for _ in range(4):
        assert stage.scheduler.schedule() is None
        stage.commit()
        plan = stage.plan()
        assert len(plan.work) == 2 and not any(work.pending for work in plan.work)


def test_the_core_hands_over_the_next_step_before_it_waits_for_the_last_one() -> None:
    class Watched(FakeExecutor):
        """Notes how many plans are out when a result is fetched."""

        out: list[int]

        def poll(self, *arguments, **more):  # type: ignore[no-untyped-def]
            self.out.append(len(self._results))
            return super().poll(*arguments, **more)

    executor = Watched(limits(), 2)
    executor.out = []
    link = Inbox([make_request("a", 5, max_tokens=6), Drain()])
    assert EngineCore(executor, link).run() == 0
    assert executor.out == [2, 2, 2, 2, 2, 1], "the last token has nothing behind it"


def test_a_failure_with_a_step_planned_behind_it_fails_every_request_once() -> None:
    executor = FakeExecutor(limits(), 2, fail_at=2)
    link = Inbox([make_request("a", 5, max_tokens=9), make_request("b", 5, max_tokens=9)])
    assert EngineCore(executor, link).run() == 1
    assert len(executor.plans) == 4, "the one that failed, and one behind it"
    failed = [o for m in link.sent if isinstance(m, Outputs) for o in m.outputs if o.error is not None]
    assert sorted(output.request_id for output in failed) == ["a", "b"]
    assert isinstance(link.sent[-1], CoreFailed) and "planted" in link.sent[-1].error
