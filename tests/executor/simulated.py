"""All ranks of any topology in this process: one thread per tensor-parallel rank, stages one after the other."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator

import torch
import zmq

from rocm_serve.config.schema import Resolved
from rocm_serve.executor.api import ExecutorFailed
from rocm_serve.executor.expert_counts import counter_of
from rocm_serve.executor.launched import Launched
from rocm_serve.executor.limits import effective_limits, with_graphs
from rocm_serve.executor.loaded_stage import LoadedStage
from rocm_serve.executor.loading import load_stage_model
from rocm_serve.executor.newest import NewestTokens
from rocm_serve.executor.runner import StageRunner, warm_up_plans
from rocm_serve.messages import WIRE_VERSION, EffectiveLimits, Plan, StepResult, WorkerLoaded, WorkerReady
from rocm_serve.parallel.comm import CountingComm, ThreadComm, run_ranks
from rocm_serve.parallel.mesh import Mesh

PATIENCE_S = 0.02  # for a plan that comes while a step runs


class SentTokens(NewestTokens):
    """The way of tokens from the last stage to the first: they wait here until the first one reads them."""

    def __init__(self, first: StageRunner, most: int) -> None:
        super().__init__(lambda count: self, first.keep_newest, most)
        self._sent: deque[torch.Tensor] = deque()
        self.taken = 0

    def send(self, plan: Plan, left: Launched) -> None:
        assert left.drawn_R3 is not None
        self._sent.append(left.drawn_R3[:, 2:].long())
        self.expect(plan)

    def wait(self) -> torch.Tensor:
        self.taken += 1
        return self._sent.popleft()


class SimulatedExecutor:
    """Executor over simulated ranks. `comms[rank]` counts the collectives of every rank.

    `changed`: makes another runner of a stage's own, before anything has run.
    """

    def __init__(
        self, resolved: Resolved, changed: Callable[[LoadedStage, StageRunner], StageRunner] = lambda stage, own: own
    ) -> None:
        self.resolved = resolved
        self._changed = changed
        self.mesh = Mesh(resolved.tp, resolved.pp, resolved.ep)
        self.depth = resolved.pp
        self.comms: dict[int, CountingComm] = {}
        self._loaded: dict[int, WorkerLoaded] = {}
        self._limits: EffectiveLimits | None = None
        self._all_loaded = threading.Barrier(resolved.tp, action=self._decide)
        self._plans: list[queue.Queue[Plan | None]] = [queue.Queue() for _ in range(resolved.tp)]
        self._results: queue.Queue[StepResult | BaseException] = queue.Queue()
        self._first_results: dict[int, StepResult] = {}
        self._in_flight: deque[int] = deque()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> EffectiveLimits:
        self._thread.start()
        ready = self._results.get(timeout=240)
        if isinstance(ready, BaseException):
            raise ready
        assert self._limits is not None
        return self._limits

    def submit(self, plan: Plan) -> None:
        assert len(self._in_flight) < self.depth
        self._in_flight.append(plan.seq)
        for one in self._plans:
            one.put(plan)

    def poll(self, timeout_s: float, wake: zmq.Socket[bytes] | None = None) -> StepResult | None:
        try:
            result = self._results.get(timeout=timeout_s if wake is None else min(timeout_s, 0.002))
        except queue.Empty:
            return None
        if isinstance(result, BaseException):
            raise ExecutorFailed(str(result)) from result
        assert result.seq == self._in_flight.popleft()
        return result

    def shutdown(self, *, failed: bool = False) -> None:
        for one in self._plans:
            one.put(None)
        self._thread.join(timeout=60)

    def _run(self) -> None:
        try:
            run_ranks(self.mesh.tp, self._rank)
        except BaseException as error:
            self._results.put(error)

    def _decide(self) -> None:
        limits = effective_limits(self.resolved, [self._loaded[r] for r in sorted(self._loaded)])
        self._limits = with_graphs(limits, [WorkerReady(0)], self.resolved.plan_ahead)
        self.depth = self.resolved.pp + self._limits.plan_ahead

    def _rank(self, comm: ThreadComm) -> None:
        stages = []
        for stage in range(self.mesh.pp):
            coord = self.mesh.coord(self.mesh.tp_group(stage)[comm.rank])
            counting = CountingComm(comm)
            self.comms[coord.rank] = counting
            part = load_stage_model(self.resolved, coord, counting)
            stages.append(part)
            self._loaded[coord.rank] = WorkerLoaded(
                coord.rank, WIRE_VERSION, part.cache_bytes, part.page_bytes, part.slot_bytes
            )
        self._all_loaded.wait()
        assert self._limits is not None
        runners = [part.runner(num_pages=self._limits.num_pages, num_slots=self._limits.num_slots) for part in stages]
        runners = [self._changed(part, runner) for part, runner in zip(stages, runners, strict=True)]
        counters = [counter_of(self.resolved, part.coord, part.facts, part.model) for part in stages]
        newest = self._newest(runners[0]) if self._limits.plan_ahead and self.mesh.pp > 1 else None
        for plan in warm_up_plans(self.resolved.page_size, self.resolved.max_model_len, self.resolved.draft_tokens):
            self._launch(runners, plan, newest).result()
        for counter in filter(None, counters):
            counter.reset()
        if comm.rank == 0:
            self._results.put(StepResult(-1, ()))
        for result in self._results_of(runners, self._plans[comm.rank], newest):
            first = self._first_results.setdefault(result.seq, result)
            assert first == result, f"rank {comm.rank} came to another result: {result} is not {first}"
            if comm.rank == 0:
                self._results.put(result)
        for counter in filter(None, counters):
            counter.write()

    def _newest(self, first: StageRunner) -> SentTokens:
        return SentTokens(first, self.depth)

    def _results_of(
        self, runners: list[StageRunner], plans: queue.Queue[Plan | None], newest: SentTokens | None
    ) -> Iterator[StepResult]:
        """Run what comes. Where steps are planned ahead, a result is read when the next ones have run, if they come.

        A step that the host draws for is read before the next one runs.
        """
        running: deque[Launched] = deque()
        while True:
            try:
                plan = plans.get(timeout=PATIENCE_S if running else None)
            except queue.Empty:
                yield running.popleft().result()
                continue
            if plan is None:
                assert not running, "sent away with a step under way"
                return
            running.append(left := self._launch(runners, plan, newest))
            late = self.depth if newest is not None and left.drawn_R3 is not None else 1
            while len(running) >= (late if self.mesh.pp > 1 else self.depth):
                yield running.popleft().result()

    def _launch(self, runners: list[StageRunner], plan: Plan, newest: SentTokens | None) -> Launched:
        hidden = None
        if newest is not None:
            newest.bring(plan)
        for runner in runners:
            out = runner.launch(plan, hidden)
            if isinstance(out, Launched):
                if newest is not None and runner.draws_ahead(plan):
                    newest.send(plan, out)
                return out
            hidden = out if plan.work else None
        raise AssertionError("the last stage gave no result")
