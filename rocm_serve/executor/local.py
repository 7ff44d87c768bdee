"""All of it in this process, for one rank: tests, debuggers and library use see one stack."""

from __future__ import annotations

import torch
import zmq

from rocm_serve.config.schema import Resolved
from rocm_serve.errors import UserError
from rocm_serve.executor.api import ExecutorFailed
from rocm_serve.executor.expert_counts import ExpertCounter, counter_of
from rocm_serve.executor.heartbeat import Heartbeat, Phase
from rocm_serve.executor.loading import load_stage_model
from rocm_serve.executor.memory import effective_limits, with_graphs
from rocm_serve.executor.runner import StageRunner, phase_of, warm_up_plans, watch_layers
from rocm_serve.messages import WIRE_VERSION, EffectiveLimits, Plan, StepResult, WorkerLoaded
from rocm_serve.parallel.comm import SoloComm
from rocm_serve.parallel.mesh import Mesh


class LocalExecutor:
    """Runs plans in the calling thread: `submit` keeps the plan, `poll` does the work. `heartbeat` counts it."""

    depth = 1

    def __init__(self, resolved: Resolved, heartbeat: Heartbeat | None = None) -> None:
        assert resolved.tp * resolved.pp == 1, "one process is one rank"
        self._resolved = resolved
        self._heartbeat = heartbeat or Heartbeat()
        self._runner: StageRunner | None = None
        self._counter: ExpertCounter | None = None
        self._plan: Plan | None = None
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
        self._runner = stage.runner(num_pages=limits.num_pages, num_slots=limits.num_slots)
        self._counter = counter_of(resolved, stage.coord, stage.facts, stage.model)
        for plan in warm_up_plans(resolved.page_size, resolved.max_model_len, resolved.draft_tokens):
            self._heartbeat.enter(Phase.WARMING_UP)
            self._run(plan, "warming up")
        limits = with_graphs(limits, [stage.capture(self._runner, self._heartbeat.tick)])
        if self._counter is not None:
            self._counter.reset()
        self._heartbeat.enter(Phase.IDLE)
        return limits

    def submit(self, plan: Plan) -> None:
        """Keep one plan for the next `poll`."""
        assert self._plan is None, "one plan at a time"
        assert plan.seq == self._next_seq, f"plan {plan.seq} where {self._next_seq} is next"
        self._next_seq += 1
        self._plan = plan

    def poll(self, timeout_s: float, wake: zmq.Socket[bytes] | None = None) -> StepResult | None:
        """Run the submitted plan and return its result; None at once when there is none.

        Errors: ExecutorFailed, with the cause chained.
        """
        plan, self._plan = self._plan, None
        if plan is None:
            return None
        self._heartbeat.enter(phase_of(plan), plan.seq)
        result = self._run(plan, f"step {plan.seq}")
        if self._counter is not None:
            self._counter.after_step()
        self._heartbeat.enter(Phase.IDLE)
        return result

    def shutdown(self, *, failed: bool = False) -> None:
        """Free model and caches."""
        if self._counter is not None and not failed:
            self._counter.write()
        self._runner = self._counter = None
        self._plan = None

    def _run(self, plan: Plan, phase: str) -> StepResult:
        assert self._runner is not None, "not started"
        try:
            result = self._runner.step(plan, None)
        except UserError:
            raise
        except Exception as error:
            raise ExecutorFailed(f"rank 0 failed during {phase}: {type(error).__name__}: {error}") from error
        assert isinstance(result, StepResult)
        return result
