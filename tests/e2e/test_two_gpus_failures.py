"""A rank that dies or stands still in mid-decode on one of two GPUs: /health says so, and nothing stays behind."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest
import torch

from tests.e2e import gpu_memory
from tests.e2e.harness import ROOT, Server

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.cuda,
    pytest.mark.timeout(200),
    pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.device_count() < 2, reason="fewer than two GPUs"),
]

MODEL = ROOT / "evals" / "tiny" / "checkpoint"
DEADLINE_S = 8
FLAGS = ("--max-model-len", "4096", "--mem-fraction", "0.8", "--watchdog-timeout", str(DEADLINE_S))
REQUESTS = 4
LAYOUTS = {"tp2": ("--tp", "2"), "pp2": ("--pp", "2")}


def rank_of(server: Server, rank: int) -> psutil.Process:
    for process in server.processes():
        if f" --rank {rank} " in " ".join(process.cmdline()) + " ":
            return process
    raise AssertionError(f"no process of rank {rank}")


def until(done: Callable[[], bool], within_s: float, otherwise: str) -> float:
    """Wait for `done`; return the seconds that it took."""
    began = time.monotonic()
    while not done():
        assert time.monotonic() - began < within_s, f"{otherwise} within {within_s:.0f} s"
        time.sleep(0.01)
    return time.monotonic() - began


def health(server: Server) -> int:
    """Return the status of /health; 0 when nobody answers."""
    try:
        with server.client(5) as client:
            return client.get("/health").status_code
    except httpx.TransportError:
        return 0


def ask(server: Server, answers: list[int]) -> None:
    body = {"model": server.name, "prompt": [5, 6, 7], "max_tokens": 4000, "ignore_eos": True}
    with server.client() as client:
        answers.append(client.post("/v1/completions", json=body).status_code)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_processes_end_within_the_deadline(layout: str, rank: int, how: signal.Signals, tmp_path: Path) -> None:
    answers: list[int] = []
    before = gpu_memory.used_mib()
    with Server(MODEL, tmp_path, (*FLAGS, *LAYOUTS[layout])) as server:
        threads = [threading.Thread(target=ask, args=(server, answers)) for _ in range(REQUESTS)]
        for thread in threads:
            thread.start()
        until(lambda: server.metrics()["rocm_serve_generation_tokens_total"] > 50 * REQUESTS, 60, "no tokens")
        family = {one.pid for one in server.processes()}
        serving, holders = gpu_memory.used_mib(), gpu_memory.pids() & family
        rank_of(server, rank).send_signal(how)
        found_s = until(lambda: health(server) == 503, DEADLINE_S + 15, "/health still well")
        began = time.monotonic()
        assert server.ends_itself(20) == 1
        ended_s = time.monotonic() - began
        for thread in threads:
            thread.join(10)
    freed_s = until(lambda: not gpu_memory.pids() & family, 10, "a GPU is still held")
    print(
        f"{layout} rank {rank} {how.name}: 503 after {found_s:.1f} s, all processes gone {ended_s:.1f} s later,"
        f" GPUs free {freed_s:.1f} s later; {len(holders)} of its processes were seen on the GPUs;"
        f" MiB {before} before, {serving} serving, {gpu_memory.used_mib()} after; answers {answers}"
    )
    assert answers == [500] * REQUESTS
    assert f"rank {rank}" in server.log.replace("rank-", "rank ")
