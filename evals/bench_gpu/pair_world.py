"""A layout that serves: supervisor, core and ranks are the product's processes; this one asks and counts."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from evals.bench_gpu.pair_records import FirstRecord
from evals.bench_gpu.pair_worker import stamps_file
from evals.bench_host.steps import Driver, Silent
from rocm_serve.config.load import environment
from rocm_serve.config.resolve import resolve
from rocm_serve.config.schema import Resolved, ServeConfig
from rocm_serve.messages import (
    AbortRequests,
    AddRequest,
    CoreReady,
    CoreStopped,
    Drain,
    EffectiveLimits,
    FromCore,
    Outputs,
    Stats,
)
from rocm_serve.models.qwen3_5.spec import ModelFacts
from rocm_serve.platform.facts import Platform
from rocm_serve.platform.probe import free_port
from rocm_serve.run_directory import run_directory
from rocm_serve.supervisor import Supervisor
from rocm_serve.trace import StageTrace, StepTrace, read_trace
from rocm_serve.types import SamplingParams

WORKER = "evals.bench_gpu.pair_worker"
WARM_UP_STEPS = 8
TAIL_STEPS = 4  # behind those that are timed: stamps are written once a later step looks
_SILENCE_S = 120.0
_START_S = 300.0
_REST_S = 0.5  # between points: ranks compare their clocks
_FIRST_TOKENS = 4


class WorldFailed(RuntimeError):
    """The server ended, or says nothing."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """When the same work went on, in nanoseconds of time.monotonic_ns(); tokens before it in a request, on average."""

    began_ns: int
    ended_ns: int
    context: int


class World:
    """One layout."""

    def __init__(self, resolved: Resolved, driver: Driver, trouble: list[str], seed: int) -> None:
        self.resolved = resolved
        self._driver = driver
        self._trouble = trouble
        self._random = np.random.default_rng(seed)
        self._next = 0
        self._counts: dict[str, int] = {}
        self._scores: dict[str, list[float]] = {}
        self._left: set[str] = set()
        self._stats = Stats()

    def ready(self) -> EffectiveLimits:
        """Wait until requests may come. Errors: WorldFailed."""
        message = self._receive(_START_S)
        assert isinstance(message, CoreReady), message
        return message.limits

    def first(self, count: int) -> FirstRecord:
        """Ask short questions, one after the other."""
        times = []
        for _ in range(count):
            began = time.perf_counter()
            self._ask(1, 4, _FIRST_TOKENS)
            self._until(lambda: not self._left)
            times.append((time.perf_counter() - began) * 1e3)
        steps = self.steps()[-_FIRST_TOKENS:]
        step_ms = (steps[-1].committed_ns - steps[0].committed_ns) / 1e6 / (len(steps) - 1)
        return FirstRecord("", tuple(times), step_ms)

    def scores(self, prompts: Sequence[Sequence[int]], *, company: bool) -> list[float]:
        """Return the log-probs of all prompts' tokens but the first ones, prompt by prompt."""
        found: list[float] = []
        for group in [prompts] if company else [[prompt] for prompt in prompts]:
            asked = self._send(group, SamplingParams(max_tokens=0, prompt_logprobs=0))
            self._until(lambda: not self._left)
            assert [len(self._scores[name]) for name in asked] == [len(prompt) - 1 for prompt in group]
            found += [value for name in asked for value in self._scores[name]]
        return found

    def prefill(self, batch: int, length: int) -> Stretch:
        """Compute `batch` prompts of `length` tokens, all there from the beginning."""
        time.sleep(_REST_S)
        began = time.monotonic_ns()
        self._ask(batch, length, 1)
        self._until(lambda: not self._left)
        ended = time.monotonic_ns()
        self._ask(1, 4, _FIRST_TOKENS)  # stamps of the last prompts are written now
        self._until(lambda: not self._left)
        return Stretch(began, ended, length)

    def decode(self, batch: int, context: int, steps: int) -> Stretch:
        """Have `batch` requests decode; return the stretch of `steps` tokens of each, once all are past prompts."""
        time.sleep(_REST_S)
        asked = self._ask(batch, context, self.resolved.max_model_len - context)
        self._until(lambda: all(self._counts.values()))
        self._advance(batch * WARM_UP_STEPS)
        began, before = time.monotonic_ns(), sum(self._counts.values())
        self._advance(batch * steps)
        ended, after = time.monotonic_ns(), sum(self._counts.values())
        self._advance(batch * TAIL_STEPS)
        assert len(self._left) == batch, "a request has ended before it was measured"
        self._driver.send(AbortRequests(tuple(asked)))
        self._until(lambda: self._stats.running == 0)
        return Stretch(began, ended, context + (before + after) // (2 * batch))

    def steps(self) -> list[StepTrace]:
        """Return all steps so far."""
        return read_trace(self._file("core.jsonl"), StepTrace)

    def stamps(self) -> dict[int, list[StageTrace]]:
        """Return all stamps so far, by rank."""
        ranks = self.resolved.local_ranks
        return {rank: read_trace(stamps_file(self.resolved.run_dir, rank), StageTrace) for rank in ranks}

    def end(self) -> None:
        """Have everything end in good order."""
        self._driver.send(Drain())
        while not isinstance(self._receive(_SILENCE_S), CoreStopped):
            pass

    def _file(self, name: str) -> Path:
        assert self.resolved.trace is not None
        return Path(self.resolved.trace) / name

    def _ask(self, batch: int, length: int, max_tokens: int) -> list[str]:
        prompts = self._random.integers(0, self.resolved.vocab_used, (batch, length)).tolist()
        return self._send(prompts, SamplingParams(max_tokens=max_tokens))

    def _send(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[str]:
        asked = [f"r{self._next + i}" for i in range(len(prompts))]
        for i, (name, prompt) in enumerate(zip(asked, prompts, strict=True)):
            own = msgspec.structs.replace(params, seed=self._next + i)
            self._driver.send(AddRequest(name, tuple(prompt), own))
        self._next += len(asked)
        self._counts = dict.fromkeys(asked, 0)
        self._scores = {name: [] for name in asked}
        self._left = set(asked)
        return asked

    def _advance(self, tokens: int) -> None:
        upto = sum(self._counts.values()) + tokens
        self._until(lambda: sum(self._counts.values()) >= upto)

    def _until(self, done: Callable[[], bool]) -> None:
        while not done():
            message = self._receive(_SILENCE_S)
            assert isinstance(message, Outputs), message
            self._stats = message.stats
            for output in message.outputs:
                assert output.error is None, output.error
                if output.request_id in self._counts:
                    self._counts[output.request_id] += len(output.tokens)
                    self._scores[output.request_id] += [one.logprob for one in output.prompt_logprobs]
                    if output.finish_reason is not None:
                        self._left.discard(output.request_id)

    def _receive(self, within_s: float) -> FromCore:
        end = time.monotonic() + within_s
        while True:
            if self._trouble:
                raise WorldFailed(self._trouble[0])
            try:
                return self._driver.receive(1.0)
            except Silent:
                if time.monotonic() > end:
                    raise WorldFailed(f"the core has said nothing for {within_s:.0f} s") from None


@contextmanager
def serving(config: ServeConfig, facts: ModelFacts, platform: Platform) -> Iterator[World]:
    """Start a layout, and end it. `ready` says when it may be asked. Errors: UserError."""
    with run_directory() as keep:
        resolved = resolve(
            msgspec.structs.replace(config, trace=str(keep.path / "trace")),
            facts,
            platform,
            vocab_used=facts.vocab_size,
            run_dir=str(keep.path),
            free_port=free_port,
            environ=environment(),
        )
        trouble: list[str] = []
        driver = Driver(resolved.run_dir)
        supervisor = Supervisor(
            resolved, dict(os.environ), on_failure=trouble.append, echo=lambda line: None, worker=WORKER
        )
        supervisor.start()
        try:
            yield World(resolved, driver, trouble, config.seed)
        finally:
            supervisor.stop(0.0)
            driver.close()
