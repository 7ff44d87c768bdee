"""Half one: the real core process over one null worker process, driven through the core's own link."""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass

import msgspec
import zmq

from evals.bench_host.machine import cpu_seconds
from evals.bench_host.serve import WORKER, bench_config, prepare_bench
from rocm_serve.compose import run_directory
from rocm_serve.engine.link import VERSION_FRAME, endpoint
from rocm_serve.errors import UserError
from rocm_serve.messages import AddRequest, CoreReady, CoreStopped, Drain, FromCore, Outputs, ToCore
from rocm_serve.supervisor import Supervisor
from rocm_serve.types import SamplingParams

PROMPT_TOKENS = 16
WARM_STEPS = 20
START_S = 120.0
SILENCE_S = 60.0


@dataclass(frozen=True)
class StepPoint:
    """One number of running requests. Times lie between messages of full decode steps; CPU is the whole run's."""

    running: int
    steps: int
    tokens: int
    median_ms: float
    p99_ms: float
    core_cpu_ms: float
    worker_cpu_ms: float


class Silent(RuntimeError):
    """The core did not answer."""


class Driver:
    """A client of the core that only counts: the server's own costs are measured by the other half."""

    def __init__(self, run_dir: str) -> None:
        self._context = zmq.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.set_hwm(0)
        self._inbox.bind(endpoint(run_dir, "from_core.sock"))
        self._outbox = self._context.socket(zmq.PUSH)
        self._outbox.set_hwm(0)
        self._outbox.connect(endpoint(run_dir, "to_core.sock"))
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FromCore] = msgspec.msgpack.Decoder(FromCore)

    def send(self, message: ToCore) -> None:
        self._outbox.send_multipart((VERSION_FRAME, self._encoder.encode(message)))

    def receive(self, timeout_s: float) -> FromCore:
        if not self._inbox.poll(timeout_s * 1000):
            raise Silent(f"the core has said nothing for {timeout_s:.0f} s")
        return self._decoder.decode(self._inbox.recv_multipart()[1])

    def close(self) -> None:
        self._context.destroy(linger=0)


def measure_steps(model: str, running: int, steps: int) -> StepPoint:
    """Run `running` requests at once for `steps` tokens each and look at the steps that held all of them."""
    with run_directory() as keep:
        resolved, _ = prepare_bench(bench_config(model, running), keep.path)
        driver = Driver(resolved.run_dir)
        trouble: list[str] = []
        supervisor = Supervisor(
            resolved, dict(os.environ), on_failure=trouble.append, echo=trouble.append, worker=WORKER
        )
        supervisor.start()
        try:
            ready = driver.receive(START_S)
            assert isinstance(ready, CoreReady), f"{ready}; {trouble}"
            pids = supervisor.pids
            used = {name: cpu_seconds([pid]) for name, pid in pids.items()}
            seen = _decode_all(driver, running, steps + WARM_STEPS)
            used = {name: cpu_seconds([pid]) - used[name] for name, pid in pids.items()}
            driver.send(Drain())
            while not isinstance(driver.receive(SILENCE_S), CoreStopped):
                pass
        finally:
            supervisor.stop()
            driver.close()
    full = [at for at, count in seen if count == running][WARM_STEPS:]
    took = sorted((after - before) * 1e3 for before, after in zip(full, full[1:], strict=False))
    if not took:
        raise UserError(f"--steps {steps}: the first of {running} requests had ended before all of them ran; take more")
    return StepPoint(
        running=running,
        steps=len(took),
        tokens=sum(count for _, count in seen),
        median_ms=statistics.median(took),
        p99_ms=took[min(len(took) - 1, len(took) * 99 // 100)],
        core_cpu_ms=used["core"] * 1e3 / len(seen),
        worker_cpu_ms=used["rank-0"] * 1e3 / len(seen),
    )


def _decode_all(driver: Driver, running: int, max_tokens: int) -> list[tuple[float, int]]:
    """Send the requests and return when each step's tokens came, and how many."""
    prompt = tuple(range(100, 100 + PROMPT_TOKENS))
    for number in range(running):
        driver.send(AddRequest(f"r{number}", prompt, SamplingParams(max_tokens=max_tokens, temperature=0.0)))
    seen: list[tuple[float, int]] = []
    left = running
    end = time.monotonic() + SILENCE_S
    while left:
        message = driver.receive(SILENCE_S)
        assert isinstance(message, Outputs), message
        now = time.monotonic()
        tokens = 0
        for output in message.outputs:
            assert output.error is None, output.error
            tokens += len(output.tokens)
            left -= output.finish_reason is not None
        if tokens:
            seen.append((now, tokens))
            end = now + SILENCE_S
        elif now > end:
            raise Silent("the core makes no tokens")
    return seen
