"""The core's loop without a wire: what it is handed at each look, and what it says."""

from __future__ import annotations

import pytest
import zmq

from rocm_serve.engine.core import EngineCore
from rocm_serve.executor.api import ExecutorFailed
from rocm_serve.messages import (
    CoreFailed,
    CoreStopped,
    Drain,
    EffectiveLimits,
    FromCore,
    Outputs,
    Stats,
    StepResult,
    ToCore,
)
from rocm_serve.types import FinishReason
from tests.engine.simulation import Drafter, FakeExecutor, make_limits, make_request

LIMITS = make_limits(num_pages=400, max_running_requests=64, chunked_prefill_size=64)


class Inbox:
    """A link without a wire: what the loop is handed at each look, and what it says."""

    def __init__(self, *looks: list[ToCore]) -> None:
        self.looks = list(looks)
        self.waits: list[float] = []
        self.sent: list[FromCore] = []
        self.inbox = None
        self.ended_before_sleep: list[int] = []

    def receive(self, timeout_s: float) -> list[ToCore]:
        self.waits.append(timeout_s)
        return self.looks.pop(0) if self.looks else []

    def send(self, message: FromCore) -> None:
        self.sent.append(message)


def test_the_loop_sleeps_when_idle_and_sends_one_message_per_step() -> None:
    idle: list[ToCore] = []
    link = Inbox(idle, idle, [make_request("a", 5, max_tokens=4), Drain()])
    executor = FakeExecutor(LIMITS)
    assert EngineCore(executor, link).run() == 0
    assert all(wait > 0.1 for wait in link.waits[:3]) and all(wait == 0 for wait in link.waits[3:])
    news = [message for message in link.sent if isinstance(message, Outputs)]
    assert len([one for one in news if one.outputs]) == len(executor.plans) == 4
    assert len(link.waits) <= 3 + len(executor.plans) + 1, "it went around without a reason"
    assert isinstance(link.sent[-1], CoreStopped)


def test_the_last_outputs_leave_before_the_loop_sleeps() -> None:
    class Watched(Inbox):
        def receive(self, timeout_s: float) -> list[ToCore]:
            if timeout_s > 0:
                self.ended_before_sleep.append(sum(bool(m.outputs) for m in self.sent if isinstance(m, Outputs)))
            return super().receive(timeout_s)

    link = Watched([make_request("a", 5, max_tokens=1)], [], [], [], [Drain()])
    assert EngineCore(FakeExecutor(LIMITS), link).run() == 0
    assert link.ended_before_sleep[0] == 0 and link.ended_before_sleep[1] == 1, "the token waited for the sleep"


def test_a_request_that_comes_after_the_drain_is_refused_by_the_core() -> None:
    link = Inbox([make_request("a", 5, max_tokens=4)], [Drain(), make_request("b", 5, max_tokens=1)])
    executor = FakeExecutor(LIMITS)
    assert EngineCore(executor, link).run() == 0
    outputs = [output for message in link.sent if isinstance(message, Outputs) for output in message.outputs]
    (refused,) = [output for output in outputs if output.request_id == "b"]
    assert refused.finish_reason is FinishReason.ERROR and "shutting down" in (refused.error or "")
    assert sum(len(output.tokens) for output in outputs) == 4, "what was open was finished"


def test_our_own_mistake_fails_the_requests_and_is_raised() -> None:
    class Wrong(FakeExecutor):
        def poll(self, timeout_s: float, wake: zmq.Socket[bytes] | None = None) -> None:
            raise ZeroDivisionError("planted")

    link = Inbox([make_request("a", 5, max_tokens=4)])
    with pytest.raises(ZeroDivisionError):
        EngineCore(Wrong(LIMITS), link).run()
    outputs, failed = link.sent[-2:]
    assert isinstance(outputs, Outputs) and outputs.outputs[0].finish_reason is FinishReason.ERROR
    assert "ZeroDivisionError: planted" in str(failed)


def test_a_worker_that_dies_while_nothing_runs_ends_the_loop_with_its_sentence() -> None:
    class Sick(FakeExecutor):
        def poll(self, timeout_s: float, wake: zmq.Socket[bytes] | None = None) -> None:
            raise ExecutorFailed("rank 3 died without a word")

    link = Inbox([], [Drain()])
    assert EngineCore(Sick(LIMITS), link).run() == 1
    assert link.sent[-1] == CoreFailed("rank 3 died without a word")


class Priced(FakeExecutor):
    """Time is a number: a step takes 10 ms, and `draft_s` more for each draft that it verifies."""

    def __init__(self, limits: EffectiveLimits, drafter: Drafter, draft_s: float, depth: int = 1) -> None:
        super().__init__(limits, depth, drafter=drafter)
        self.now_s = 0.0
        self._draft_s = draft_s

    def poll(self, timeout_s: float, wake: zmq.Socket[bytes] | None = None) -> StepResult | None:
        result = super().poll(timeout_s, wake)
        if result is not None:
            drafts = sum(len(work.drafts) for work in self.plans[result.seq].work)
            self.now_s += 0.01 + drafts * self._draft_s
        return result


def drafts_of(executor: FakeExecutor) -> list[int]:
    return [sum(len(work.drafts) for work in plan.work) for plan in executor.plans]


def serve_priced(adaptive: bool, right: float, draft_s: float, answers: int = 24) -> tuple[list[int], Stats]:
    """Answer requests, four at a time; return the drafts of each plan, and the last numbers."""
    limits = make_limits(max_running_requests=4, num_pages=512, draft_tokens=2)
    executor = Priced(limits, Drafter((right, right), stops=0.0), draft_s)
    requests: list[ToCore] = [make_request(f"r{n}", 5, seed=n, max_tokens=80) for n in range(answers)]
    link = Inbox([*requests, Drain()])
    core = EngineCore(executor, link, adaptive_drafting=adaptive, clock=lambda: executor.now_s)
    assert core.run() == 0
    tokens = sum(len(o.tokens) for m in link.sent if isinstance(m, Outputs) for o in m.outputs)
    assert tokens == answers * 80
    return drafts_of(executor), [m.stats for m in link.sent if isinstance(m, Outputs)][-1]


def test_auto_stops_drafting_that_loses_and_mtp_does_not() -> None:
    drafts, stats = serve_priced(adaptive=True, right=0.0, draft_s=0.01)
    assert drafts[1] == 8 and drafts[2:70].count(0) == 0 and drafts[-60:].count(0) == 60
    (speed,) = [speed for speed in stats.draft_speeds if speed.requests == 4]
    assert not speed.drafting and speed.net == pytest.approx(0.01 / 0.09)
    drafts, stats = serve_priced(adaptive=False, right=0.0, draft_s=0.01)
    assert 0 < drafts[1:].count(0) <= len(drafts) / 12, "a small share measures, the rest drafts"
    (speed,) = [speed for speed in stats.draft_speeds if speed.requests == 4]
    assert speed.drafting and speed.net == pytest.approx(0.01 / 0.09)
    assert stats.accepted_draft_tokens == 0 < stats.draft_tokens == sum(drafts)


def test_auto_keeps_drafting_that_gains() -> None:
    drafts, stats = serve_priced(adaptive=True, right=1.0, draft_s=0.0001, answers=64)
    assert drafts.count(0) <= len(drafts) / 8 and stats.decode_tokens > 2.5 * stats.decode_forwards
    (speed,) = [speed for speed in stats.draft_speeds if speed.requests == 4]
    assert speed.drafting and speed.net > 2.5
    assert stats.draft_tokens_by_position[0] >= stats.draft_tokens_by_position[1] > 0
    assert stats.accepted_draft_tokens_by_position == stats.draft_tokens_by_position


def test_without_drafting_nothing_is_measured() -> None:
    link = Inbox([make_request("a", 5, max_tokens=9), Drain()])
    assert EngineCore(FakeExecutor(LIMITS), link).run() == 0
    stats = [m.stats for m in link.sent if isinstance(m, Outputs)][-1]
    assert (stats.draft_speeds, stats.draft_tokens_by_position, stats.draft_tokens) == ((), (), 0)
    assert stats.decode_forwards == stats.decode_tokens == 8
