"""The contract between the engine core and whatever runs its plans. Imports no torch."""

from __future__ import annotations

from typing import Protocol

import zmq

from rocm_serve.messages import EffectiveLimits, Plan, StepResult


class ExecutorFailed(RuntimeError):
    """A worker died or reported an error; the executor is unusable. The message names rank and phase."""


class Executor(Protocol):
    """Runs plans in order and hands results back in the same order."""

    depth: int  # plans that may be in flight: as many as stages, one more where steps are planned ahead; `start` tells

    def start(self) -> EffectiveLimits:
        """Load, allocate, warm up; block until plans may come. Raises ExecutorFailed."""
        ...

    def submit(self, plan: Plan) -> None:
        """Queue one plan; never blocks on its result. At most `depth` unanswered plans."""
        ...

    def poll(self, timeout_s: float, wake: zmq.Socket[bytes] | None = None) -> StepResult | None:
        """Next result in submit order, or None after `timeout_s`, or as soon as `wake` can be read from, or early for
        no reason. Raises ExecutorFailed."""
        ...

    def shutdown(self, *, failed: bool = False) -> None:
        """Stop workers and free everything; `failed`: this is no orderly end. Idempotent."""
        ...
