"""The core's side of workers in processes of their own: plans out, results in, failures named. Imports no torch.

The processes themselves are started by the supervisor; they connect here.
"""

from __future__ import annotations

import time
from collections import deque
from typing import NoReturn, TypeVar

import zmq

from rocm_serve.config.schema import Resolved
from rocm_serve.executor.api import ExecutorFailed
from rocm_serve.executor.heartbeat import Heartbeat, Phase
from rocm_serve.executor.limits import effective_limits, with_graphs
from rocm_serve.executor.link import CoreLink, channels
from rocm_serve.messages import (
    WIRE_VERSION,
    AllocateCache,
    EffectiveLimits,
    FromWorker,
    Plan,
    Shutdown,
    StepResult,
    WorkerFailed,
    WorkerLoaded,
    WorkerReady,
)

_TICK_S = 0.5
_HEAR_OUT_S = 0.5  # after the first sign of failure: its neighbours fail with it, and the cause may speak second
_LEAVE_S = 5.0

M = TypeVar("M", WorkerLoaded, WorkerReady)


class MultiprocExecutor:
    """Runs plans on tp x pp worker processes. Use from one thread.

    `heartbeat` ticks whenever the owner looks here, and tells the supervisor which plan was sent last.
    """

    def __init__(self, resolved: Resolved, heartbeat: Heartbeat | None = None) -> None:
        self.depth = resolved.pp
        self._resolved = resolved
        self._heartbeat = heartbeat or Heartbeat()
        self._world = resolved.tp * resolved.pp
        self._link: CoreLink | None = None
        self._phase = "loading"
        self._next_seq = 0
        self._in_flight: deque[int] = deque()
        self._head_since = 0.0  # when the oldest unanswered plan became the oldest

    def start(self) -> EffectiveLimits:
        """Wait for every worker to join, load, allocate and warm up.

        Errors: ExecutorFailed naming rank and phase; UserError when the caches do not fit.
        """
        self._link = CoreLink(channels(self._resolved))
        loaded = self._from_all(WorkerLoaded)
        for one in loaded:
            if one.version != WIRE_VERSION:
                raise ExecutorFailed(f"rank {one.rank} speaks wire version {one.version}, the core {WIRE_VERSION}")
        limits = effective_limits(self._resolved, loaded)
        self._phase = "warming up"
        self._link.publish(AllocateCache(num_pages=limits.num_pages, num_slots=limits.num_slots))
        ready = self._from_all(WorkerReady)
        self._phase = "serving"
        limits = with_graphs(limits, ready, self._resolved.plan_ahead)
        self.depth = self._resolved.pp + limits.plan_ahead
        return limits

    def submit(self, plan: Plan) -> None:
        """Send one plan to every worker."""
        assert self._link is not None
        assert len(self._in_flight) < self.depth, "more plans in flight than there may be"
        assert plan.seq == self._next_seq, f"plan {plan.seq} where {self._next_seq} is next"
        self._link.publish(plan)
        self._heartbeat.enter(Phase.IDLE, plan.seq)
        self._next_seq += 1
        if not self._in_flight:
            self._head_since = time.monotonic()
        self._in_flight.append(plan.seq)

    def poll(self, timeout_s: float, wake: zmq.Socket[bytes] | None = None) -> StepResult | None:
        """Return the next result, or None after `timeout_s`; with `wake`, also when that socket can be read from.

        Errors: ExecutorFailed, also when the oldest plan has had no result for `dist_timeout` seconds.
        """
        end = time.monotonic() + timeout_s
        while True:
            message = self._receive(end - time.monotonic(), wake)
            if isinstance(message, StepResult):
                expected = self._in_flight.popleft()
                assert message.seq == expected, f"result of step {message.seq} where {expected} is due"
                self._head_since = time.monotonic()
                return message
            assert message is None, f"unexpected while serving: {message}"
            now = time.monotonic()
            if self._in_flight and now - self._head_since > self._resolved.dist_timeout:
                raise ExecutorFailed(
                    f"step {self._in_flight[0]} has no result after --dist-timeout {self._resolved.dist_timeout} s"
                )
            if now >= end or wake is not None:
                return None

    def shutdown(self, *, failed: bool = False) -> None:
        """Tell every worker to leave, and whether in good order, see them go, and close the channels. Idempotent."""
        link, self._link = self._link, None
        if link is None:
            return
        link.publish(Shutdown(failed))
        end = time.monotonic() + (0.0 if failed else _LEAVE_S)  # after a failure the supervisors see to that
        while link.left < link.joined and time.monotonic() < end:
            link.receive(_TICK_S)
        link.close()

    def _from_all(self, kind: type[M]) -> list[M]:
        """Wait for one message of `kind` from every rank; return them in rank order.

        Every rank has joined when this returns, so nothing published later is lost. Joining has a deadline, what
        follows has none: loading terabytes takes as long as it takes, and a dead worker is noticed.
        """
        assert self._link is not None
        got: dict[int, M] = {}
        end = time.monotonic() + self._resolved.dist_timeout
        while len(got) < self._world or len(self._link.joined) < self._world:
            message = self._receive(_TICK_S)
            if message is not None:
                assert isinstance(message, kind), f"unexpected during {self._phase}: {message}"
                got[message.rank] = message
            missing = sorted(set(range(self._world)) - self._link.joined)
            if missing and time.monotonic() > end:
                raise ExecutorFailed(f"ranks {missing} did not join within {self._resolved.dist_timeout} s")
        return [got[rank] for rank in sorted(got)]

    def _receive(self, timeout_s: float, wake: zmq.Socket[bytes] | None = None) -> FromWorker | None:
        assert self._link is not None
        self._heartbeat.tick()
        message = self._link.receive(timeout_s, wake)
        if isinstance(message, WorkerFailed):
            self._fail(message)
        if self._link.left:
            self._fail(None)
        return message

    def _fail(self, first: WorkerFailed | None) -> NoReturn:
        """Hear everybody out, then name the cause: a rank that died without a word, else the first to complain."""
        assert self._link is not None
        failures = [first] if first is not None else []
        end = time.monotonic() + _HEAR_OUT_S
        while time.monotonic() < end:
            message = self._link.receive(end - time.monotonic())
            if isinstance(message, WorkerFailed):
                failures.append(message)
        silent = sorted(self._link.left - {failure.rank for failure in failures})
        if silent:
            phase = f"step {self._in_flight[0]}" if self._in_flight else self._phase
            who = f"rank {silent[0]}" if len(silent) == 1 else f"ranks {', '.join(map(str, silent))}"
            raise ExecutorFailed(f"{who} died without a word during {phase}")
        cause = failures[0]
        raise ExecutorFailed(f"rank {cause.rank} failed during {cause.phase}: {cause.error}")
