"""All of it in this process, for one rank: tests, debuggers and library use see one stack."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
import zmq

from rocm_serve.config.schema import Resolved
from rocm_serve.errors import UserError
from rocm_serve.executor.api import ExecutorFailed
from rocm_serve.executor.expert_counts import ExpertCounter, counter_of
from rocm_serve.executor.heartbeat import Heartbeat, Phase
from rocm_serve.executor.launched import Launched
from rocm_serve.executor.limits import effective_limits, with_graphs
from rocm_serve.executor.loading import load_stage_model
from rocm_serve.executor.runner import StageRunner, phase_of, start_up_plans, watch_layers
from rocm_serve.messages import WIRE_VERSION, EffectiveLimits, Plan, StepResult, WorkerLoaded
from rocm_serve.parallel.comm import SoloComm
from rocm_serve.parallel.mesh import Mesh


class LocalExecutor:
    """Runs plans in the calling thread: `submit` keeps the plan, `poll` does the work. `heartbeat` counts it.

    Where steps are planned ahead, `submit` gives them to the device, and `poll` waits for the oldest.
    """

    def __init__(self, resolved: Resolved, heartbeat: Heartbeat | None = None) -> None:
        assert resolved.tp * resolved.pp == 1, "one process is one rank"
        self._resolved = resolved
        self._heartbeat = heartbeat or Heartbeat()
        self._runner: StageRunner | None = None
        self._counter: ExpertCounter | None = None
        self.depth = 1
        self._plan: Plan | None = None
        self._launched: deque[tuple[Plan, Launched]] = deque()
        self._next_seq = 0

    def start(self) -> EffectiveLimits:
        """Load, allocate, warm up.

        Errors: UserError when the model cannot be served as wished; ExecutorFailed when warming up fails.
        """
        resolved = self._resolved
        torch.set_num_threads(resolved.torch_threads)
        self._heartbeat.enter(Phase.LOADING)
        stage = load_stage_model(resolved, Mesh(tp=1, pp=1).coord(0), SoloComm(), moved=self._heartbeat.tick)
        watch_layers(stage.model, self._heartbeat)
        self._heartbeat.enter(Phase.ALLOCATING)
        loaded = WorkerLoaded(0, WIRE_VERSION, stage.cache_bytes, stage.page_bytes, stage.slot_bytes)
        limits = effective_limits(resolved, [loaded])
        runner = stage.runner(num_pages=limits.num_pages, num_slots=limits.num_slots)
        self._runner = replace(runner, prompts=None)
        self._counter = counter_of(resolved, stage.coord, stage.facts, stage.model)
        for plan in start_up_plans(resolved, limits.num_pages, limits.num_slots):
            self._heartbeat.enter(Phase.WARMING_UP)
            self._run(plan, "warming up")
        ready = stage.capture(runner, self._heartbeat.tick)
        self._runner = stage.after_capture(runner, ready)
        limits = with_graphs(limits, [ready], resolved.plan_ahead)
        self.depth = 1 + limits.plan_ahead
        if self._counter is not None:
            self._counter.reset()
        self._heartbeat.enter(Phase.IDLE)
        return limits

    def submit(self, plan: Plan) -> None:
        """Keep one plan for the next `poll`, or begin it. Errors: ExecutorFailed, with the cause chained."""
        assert self._plan is None and len(self._launched) < self.depth, "too many plans at a time"
        assert plan.seq == self._next_seq, f"plan {plan.seq} where {self._next_seq} is next"
        self._next_seq += 1
        if self.depth == 1:
            self._plan = plan
            return
        self._heartbeat.enter(phase_of(plan), plan.seq)
        with _failing(f"step {plan.seq}"):
            assert self._runner is not None, "not started"
            left = self._runner.launch(plan, None)
            assert isinstance(left, Launched)
        self._launched.append((plan, left))

    def poll(self, timeout_s: float, wake: zmq.Socket[bytes] | None = None) -> StepResult | None:
        """Run the submitted plan, or wait for the oldest, and return its result; None at once when there is none.

        Errors: ExecutorFailed, with the cause chained.
        """
        result = self._oldest() if self._launched else self._kept()
        if result is not None:
            if self._counter is not None:
                self._counter.after_step()
            if not self._launched:
                self._heartbeat.enter(Phase.IDLE)
        return result

    def shutdown(self, *, failed: bool = False) -> None:
        """Free model and caches."""
        if self._counter is not None and not failed:
            self._counter.write()
        self._runner = self._counter = None
        self._plan = None
        self._launched.clear()

    def _kept(self) -> StepResult | None:
        plan, self._plan = self._plan, None
        if plan is None:
            return None
        self._heartbeat.enter(phase_of(plan), plan.seq)
        return self._run(plan, f"step {plan.seq}")

    def _oldest(self) -> StepResult:
        plan, left = self._launched.popleft()
        self._heartbeat.enter(phase_of(plan), plan.seq)
        with _failing(f"step {plan.seq}"):
            return left.result()

    def _run(self, plan: Plan, phase: str) -> StepResult:
        assert self._runner is not None, "not started"
        with _failing(phase):
            result = self._runner.step(plan, None)
        assert isinstance(result, StepResult)
        return result


@contextmanager
def _failing(phase: str) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise ExecutorFailed(f"rank 0 failed during {phase}: {type(error).__name__}: {error}") from error
