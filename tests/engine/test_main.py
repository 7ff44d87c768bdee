"""The core as a process of its own, against workers that are threads of the test."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from rocm_serve.config.schema import Resolved
from rocm_serve.engine.client import EngineClient, EngineDead
from rocm_serve.executor.link import WorkerLink, channels
from rocm_serve.messages import (
    WIRE_VERSION,
    AddRequest,
    AllocateCache,
    Plan,
    Shutdown,
    WorkerFailed,
    WorkerLoaded,
    WorkerReady,
)
from rocm_serve.trace import StepTrace, read_trace
from rocm_serve.types import FinishReason, SamplingParams
from tests.engine.simulation import FakeWorker, alone, make_limits, make_prompt
from tests.executor.wishes import resolved as wished


def resolved(run_dir: str, *, dist_timeout: int = 60) -> Resolved:
    return wished(
        pp=2,
        dist_timeout=dist_timeout,
        page_size=4,
        chunked_prefill_size=16,
        max_model_len=64,
        vocab_size=16,
        vocab_used=11,
        eos_token_ids=(),
        run_dir=run_dir,
    )


def work(run_dir: str, rank: int, fail_at: int | None) -> None:
    """One worker's life; rank 1 is the last stage."""
    link = WorkerLink(channels(resolved(run_dir)), rank)
    worker = FakeWorker(make_limits(max_model_len=64, chunked_prefill_size=16))
    link.send(WorkerLoaded(rank, WIRE_VERSION, cache_bytes=10_000, page_bytes=10, slot_bytes=10))
    while True:
        message = link.receive(wait=True)
        if isinstance(message, AllocateCache):
            link.send(WorkerReady(rank))
        elif isinstance(message, Plan):
            if message.seq == fail_at and rank == 1:
                link.send(WorkerFailed(rank, "forward", "a planted fault"))
                break
            result = worker.execute(message)
            if rank == 1:
                link.send(result)
        else:
            assert isinstance(message, Shutdown)
            break
    link.close()


@pytest.fixture
def run_dir() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="main-") as path:
        yield path


class Core:
    """The process, its workers, and a client."""

    def __init__(self, config: Resolved, *, workers: int = 2, fail_at: int | None = None) -> None:
        self.trace = Path(config.run_dir) / "trace"
        config = msgspec.structs.replace(config, trace=str(self.trace))
        file = Path(config.run_dir) / "resolved.json"
        file.write_bytes(msgspec.json.encode(config))
        self._log = Path(config.run_dir) / "log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-X", "importtime", "-m", "rocm_serve.engine.main"] + ["--resolved", str(file)],
                stdin=subprocess.PIPE,  # closing it ends the process at once, so it stays open until the end
                stderr=log,
            )
        self.threads = [threading.Thread(target=work, args=(config.run_dir, r, fail_at)) for r in range(workers)]
        for thread in self.threads:
            thread.start()

    def end(self) -> tuple[int, str]:
        """Exit code and what it wrote."""
        code = self.process.wait(timeout=30)
        self.close_input()
        for thread in self.threads:
            thread.join(20)
            assert not thread.is_alive()
        return code, self._log.read_text()

    def close_input(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()


@pytest.mark.parametrize("by_signal", [False, True])
def test_the_process_serves_ignores_interrupts_drains_and_exits_with_0(run_dir: str, by_signal: bool) -> None:
    core = Core(resolved(run_dir))
    request = AddRequest("a", make_prompt(5, 30), SamplingParams(max_tokens=12))

    async def story() -> None:
        client = EngineClient(run_dir)
        limits = await client.start()
        core.process.send_signal(signal.SIGINT)
        outputs = [output async for output in client.generate(request)]
        tokens = [token for output in outputs for token in output.tokens]
        assert tokens == alone(request.prompt, request.params, limits).tokens
        if by_signal:
            core.process.send_signal(signal.SIGTERM)
        await client.drain()
        assert client.state == "dead" and client.error is None
        await client.close()

    asyncio.run(asyncio.wait_for(story(), timeout=60))
    code, errors = core.end()
    assert code == 0, errors
    imported = {line.rsplit("|", 1)[-1].strip() for line in errors.splitlines() if line.startswith("import time:")}
    assert "rocm_serve.engine.scheduler" in imported and "torch" not in imported
    steps = read_trace(core.trace / "core.jsonl", StepTrace)
    assert [step.seq for step in steps] == list(range(len(steps))) and len(steps) == 13
    assert all(step.submitted_ns <= step.committed_ns for step in steps)


def test_a_failed_worker_ends_the_process_with_1_and_its_sentence(run_dir: str) -> None:
    core = Core(resolved(run_dir), fail_at=3)

    async def story() -> None:
        client = EngineClient(run_dir)
        await client.start()
        request = AddRequest("a", make_prompt(5, 30), SamplingParams(max_tokens=12))
        *_, output = [output async for output in client.generate(request)]
        assert output.finish_reason is FinishReason.ERROR
        assert output.error == "rank 1 failed during forward: a planted fault"
        await client.close()

    asyncio.run(asyncio.wait_for(story(), timeout=60))
    code, errors = core.end()
    assert code == 1 and "rank 1 failed during forward: a planted fault" in errors


def test_workers_that_never_join_end_the_process_with_1(run_dir: str) -> None:
    core = Core(resolved(run_dir, dist_timeout=1), workers=0)

    async def story() -> None:
        client = EngineClient(run_dir)
        with pytest.raises(EngineDead, match="did not join"):
            await client.start()
        await client.close()

    asyncio.run(asyncio.wait_for(story(), timeout=60))
    assert core.end()[0] == 1


def test_the_process_ends_when_its_starter_is_gone(run_dir: str) -> None:
    core = Core(resolved(run_dir), workers=0)
    core.close_input()
    assert core.end()[0] == 1
