"""The engine's one loop: inbox -> scheduler -> executor -> scheduler -> outbox. No torch.

Up to `executor.depth` plans are in flight. The next plan is handed over before the outputs of the last one are sent,
so that the workers never wait for the server. When nothing is open, the loop sleeps on its inbox.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final, Protocol

import zmq

from rocm_serve.engine.drafting import DraftPolicy
from rocm_serve.engine.scheduler import Scheduler
from rocm_serve.errors import UserError
from rocm_serve.executor.api import Executor, ExecutorFailed
from rocm_serve.messages import (
    WIRE_VERSION,
    AbortRequests,
    AddRequest,
    CoreFailed,
    CoreReady,
    CoreStopped,
    Drain,
    FromCore,
    Output,
    Outputs,
    Plan,
    Stats,
    ToCore,
)
from rocm_serve.trace import StepTrace
from rocm_serve.types import FinishReason

log = logging.getLogger(__name__)

IDLE_WAIT_S: Final = 0.2  # asleep on the inbox; then a look at the workers
BUSY_WAIT_S: Final = 0.2  # asleep on the result

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1
EXIT_WISH: Final = 2  # a UserError: the wish cannot be met


class Link(Protocol):
    """What the loop needs of the way to the server."""

    @property
    def inbox(self) -> zmq.Socket[bytes] | None: ...

    def receive(self, timeout_s: float) -> list[ToCore]: ...

    def send(self, message: FromCore) -> None: ...


class EngineCore:
    """Serve requests until drained (exit code 0) or until the executor fails (1) or refuses to start (2).

    `trace` is called once per finished step. `adaptive_drafting`: sizes of batch at which drafting loses stop it.
    `clock` gives the seconds by which that is measured.
    """

    def __init__(
        self,
        executor: Executor,
        link: Link,
        *,
        trace: Callable[[StepTrace], None] | None = None,
        adaptive_drafting: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.refusal: str | None = None  # of a wish that cannot be met; whoever runs this tells it
        self._executor = executor
        self._link = link
        self._trace = trace
        self._adaptive = adaptive_drafting
        self._clock = clock
        self._policy: DraftPolicy | None = None  # where nothing drafts
        self._scheduler: Scheduler | None = None
        self._draining = False
        self._outputs: list[Output] = []
        self._sent_stats: Stats | None = None
        self._submitted: dict[int, tuple[Plan, int, int]] = {}  # seq -> plan, plans in flight, time

    def drain(self) -> None:
        """Finish what is open, then stop. May be called from a signal handler or another thread."""
        self._draining = True

    def run(self) -> int:
        """Start the executor, run the loop, stop the executor; return the exit code of the process."""
        try:
            limits = self._executor.start()
            self._scheduler = Scheduler(limits, self._executor.depth)
            if limits.draft_tokens:
                self._policy = DraftPolicy(self._executor.depth, adaptive=self._adaptive)
            self._link.send(CoreReady(WIRE_VERSION, limits))
            self._loop(self._scheduler)
            self._executor.shutdown()
            self._link.send(CoreStopped())
            return EXIT_OK
        except (ExecutorFailed, UserError) as error:
            self._fail(str(error))
            if isinstance(error, UserError):
                self.refusal = str(error)
                return EXIT_WISH
            log.error("engine core: %s", error)
            return EXIT_FAILED
        except BaseException as error:
            self._fail(f"the engine core failed: {type(error).__name__}: {error}")
            raise
        finally:
            self._executor.shutdown(failed=True)  # nothing to do after an orderly one

    def _loop(self, scheduler: Scheduler) -> None:
        while True:
            resting = scheduler.idle and not self._draining and not self._outputs
            self._read_inbox(scheduler, IDLE_WAIT_S if resting else 0.0)
            self._fill(scheduler)
            self._publish(scheduler)
            if scheduler.idle and self._draining:
                return
            self._collect(scheduler)

    def _read_inbox(self, scheduler: Scheduler, timeout_s: float) -> None:
        for message in self._link.receive(timeout_s):
            if isinstance(message, AddRequest):
                self._add(scheduler, message)
            elif isinstance(message, AbortRequests):
                scheduler.abort(message.request_ids, finished=message.finished)
            else:
                assert isinstance(message, Drain), message
                self._draining = True

    def _add(self, scheduler: Scheduler, request: AddRequest) -> None:
        error = None
        if self._draining:
            error = "the server is shutting down"
        else:
            try:
                scheduler.add(request)
            except ValueError as refused:
                error = str(refused)
        if error is not None:
            self._outputs.append(Output(request.request_id, finish_reason=FinishReason.ERROR, error=error))

    def _fill(self, scheduler: Scheduler) -> None:
        while (plan := self._plan(scheduler)) is not None:
            self._submitted[plan.seq] = plan, len(scheduler.in_flight), time.monotonic_ns()
            self._executor.submit(plan)
        assert scheduler.idle or scheduler.in_flight, "open requests, and nothing that could move them"

    def _plan(self, scheduler: Scheduler) -> Plan | None:
        if self._policy is None:
            return scheduler.schedule()
        requests = len(scheduler.running)
        drafting = self._policy.wants(requests)
        plan = scheduler.schedule(drafting)
        if plan is not None:
            decodes = all(work.recurrent and work.samples for work in plan.work)
            self._policy.planned(plan.seq, requests, drafting, decodes)
        return plan

    def _collect(self, scheduler: Scheduler) -> None:
        """Wait for the oldest result as long as nothing else can be done; look for a dead worker in any case.

        With `depth` plans in flight nothing that arrives could be planned before it; with fewer, a message is heard.
        """
        room = len(scheduler.in_flight) < scheduler.depth
        timeout_s = BUSY_WAIT_S if scheduler.in_flight else 0.0
        result = self._executor.poll(timeout_s, self._link.inbox if room else None)
        if result is None:
            return
        outputs = scheduler.commit(result)
        self._outputs += outputs
        if self._policy is not None:
            self._policy.committed(result.seq, sum(len(output.tokens) for output in outputs), self._clock())
        plan, in_flight, submitted_ns = self._submitted.pop(result.seq)
        if self._trace is not None:
            recurrent = sum(work.recurrent for work in plan.work)
            now = time.monotonic_ns()
            self._trace(StepTrace(plan.seq, len(plan.work), recurrent, in_flight, submitted_ns, now))

    def _publish(self, scheduler: Scheduler) -> None:
        stats = scheduler.stats(self._policy.speeds() if self._policy is not None else ())
        if self._outputs or stats != self._sent_stats:
            self._link.send(Outputs(tuple(self._outputs), stats))
            self._outputs.clear()
            self._sent_stats = stats

    def _fail(self, sentence: str) -> None:
        """Tell every open request, then the server, why nothing more will come."""
        outputs = self._outputs
        if self._scheduler is not None:
            for request_id in self._scheduler.open_requests:
                outputs.append(Output(request_id, finish_reason=FinishReason.ERROR, error=sentence))
            self._link.send(Outputs(tuple(outputs), self._sent_stats or Stats()))
        self._link.send(CoreFailed(sentence))
