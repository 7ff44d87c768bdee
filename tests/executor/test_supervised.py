"""Core and worker as processes under a supervisor: memory as planned, a clean end, and a death that ends everything."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rocm_serve.checkpoint.reader import read_config
from rocm_serve.config.schema import Resolved
from rocm_serve.engine.client import EngineClient
from rocm_serve.executor import stage_memory, step_memory
from rocm_serve.messages import AddRequest, EffectiveLimits, Output
from rocm_serve.models.qwen3_5.spec import ConfigFormats, parse_config, stage_params
from rocm_serve.parallel.mesh import Mesh
from rocm_serve.platform.probe import free_port
from rocm_serve.supervisor import Supervisor
from rocm_serve.types import FinishReason, SamplingParams
from tests.executor.wishes import resolved
from tests.test_supervisor import gone

pytestmark = pytest.mark.multirank

# What a worker takes beside its plan: sockets, gloo, allocator slack, code that torch loads at first use.
BESIDE_THE_PLAN = 64 << 20


@contextmanager
def supervised(wish: Resolved) -> Iterator[tuple[Supervisor, list[str]]]:
    failures: list[str] = []
    supervisor = Supervisor(wish, dict(os.environ), on_failure=failures.append, echo=lambda line: None)
    supervisor.start()
    try:
        yield supervisor, failures
    finally:
        supervisor.stop(grace_s=0)


async def complete(client: EngineClient, request_id: str, length: int, max_tokens: int) -> list[Output]:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return [news async for news in client.generate(AddRequest(request_id, tuple(range(length)), params))]


def resident_bytes(pid: int) -> int:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def resident_bytes_of_code() -> int:
    """Of a worker that has imported everything and loaded nothing."""
    code = (
        "import rocm_serve.executor.worker, re, pathlib, torch; torch.ones(64, 64) @ torch.ones(64, 64);"
        " print(re.search(r'VmRSS:\\s+(\\d+)', pathlib.Path('/proc/self/status').read_text())[1])"
    )
    return int(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout) * 1024


def planned_bytes(wish: Resolved, limits: EffectiveLimits, rank: int) -> int:
    facts, coord = parse_config(*read_config(wish.model)), Mesh(wish.tp, wish.pp).coord(rank)
    params = stage_params(facts, coord, formats=ConfigFormats(facts), mtp=False)
    caches = limits.num_pages * stage_memory.page_bytes(facts, coord, wish)
    caches += (limits.num_slots + 1) * stage_memory.slot_bytes(facts, coord, wish)
    return stage_memory.weight_bytes(params, coord, wish) + step_memory.step_bytes(params, facts, coord, wish) + caches


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 2)])
def test_memory_is_as_planned_and_draining_ends_everything_with_code_0(
    tp: int, pp: int, checkpoint: Path, tmp_path: Path
) -> None:
    wish = resolved(
        model=str(checkpoint),
        run_dir=str(tmp_path),
        max_running_requests=4,
        tp=tp,
        pp=pp,
        dist_init_addr=f"127.0.0.1:{free_port()}",
    )
    ranks = range(tp * pp)

    async def use(supervisor: Supervisor) -> tuple[EffectiveLimits, list[int]]:
        client = EngineClient(wish.run_dir)
        limits = await asyncio.wait_for(client.start(), 120)
        answers = await asyncio.gather(*(complete(client, f"r{i}", 100, 3) for i in range(4)))
        assert all(news[-1].finish_reason is FinishReason.LENGTH for news in answers)
        resident = [resident_bytes(supervisor.pids[f"rank-{rank}"]) for rank in ranks]
        await client.drain()
        await client.close()
        return limits, resident

    with supervised(wish) as (supervisor, failures):
        limits, resident = asyncio.run(use(supervisor))
        supervisor.stop(grace_s=20)
        assert supervisor.exit_codes == {"core": 0} | {f"rank-{rank}": 0 for rank in ranks}
        assert supervisor.failure is None and failures == [] and supervisor.exit_code == 0
    code = resident_bytes_of_code()
    for rank in ranks:
        grown, plan = resident[rank] - code, planned_bytes(wish, limits, rank)
        print(f"rank {rank} of tp {tp} x pp {pp}: grown by {grown / 1e6:.0f} MB, plan {plan / 1e6:.0f} MB")
        assert grown <= 1.1 * plan + BESIDE_THE_PLAN
        assert grown >= 0.5 * plan, "the plan is far too large"
    assert not [path for path in tmp_path.iterdir() if path.is_socket()]


def test_a_killed_worker_fails_open_requests_and_ends_the_core(checkpoint: Path, tmp_path: Path) -> None:
    wish = resolved(model=str(checkpoint), run_dir=str(tmp_path))

    async def use(supervisor: Supervisor) -> list[Output]:
        client = EngineClient(wish.run_dir)
        await asyncio.wait_for(client.start(), 120)
        asyncio.get_running_loop().call_later(0.5, os.kill, supervisor.pids["rank-0"], 9)
        try:
            return await complete(client, "long", 3, 250)
        finally:
            await client.close()

    with supervised(wish) as (supervisor, failures):
        news = asyncio.run(use(supervisor))
        assert news[-1].finish_reason is FinishReason.ERROR and "rank 0 died without a word" in str(news[-1].error)
        assert all(gone(pid) for pid in supervisor.pids.values())
        supervisor.stop()
        assert supervisor.failure is not None and supervisor.exit_code == 1
        assert supervisor.failure.startswith("rank-0 ended with signal SIGKILL") and "serving" in supervisor.failure
        assert failures == [supervisor.failure]
