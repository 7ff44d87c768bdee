"""The reference launch, flag for flag: two supervisors on the loopback take it as it is written for two nodes of eight
MI300X, and 256 clients at once wait for 16 places without being turned away.

Only paths, sizes and ports differ from the original. `make eval-reference` has the real lm_eval ask the same launch.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.harness import ROOT
from tests.e2e.two_nodes import Node, TwoNodes
from tests.made import small_checkpoint

pytestmark = pytest.mark.multirank

RUNNING, CLIENTS = 16, 256
LAUNCH = (
    "--model-path {model} --tp-size 2 --pp-size 2 --nnodes 2 --node-rank {rank} --dist-init-addr {address}"
    " --dist-timeout 3600 --attention-backend aiter --chunked-prefill-size 8192 --watchdog-timeout 1200"
    " --mem-fraction-static 0.95 --host 0.0.0.0 --port {port} --disable-radix-cache --disable-custom-all-reduce"
    " --page-size 16 --kv-cache-dtype fp8_e4m3 --cuda-graph-max-bs 8 --max-running-requests 16"
    " --reasoning-parser qwen3 --tool-call-parser qwen3_coder"
)
ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_HCA": "ionic_0,ionic_1",
    "NCCL_IB_GID_INDEX": "1",
    "RCCL_AINIC_ROCE": "1",
    "SGLANG_USE_AITER": "1",
    "OMP_NUM_THREADS": "1",
}
# What a line of the report says of each flag that changes nothing here.
TOLD = (
    "--disable-radix-cache has no effect: there is no prefix cache",
    "--graph-max-batch 8 has no effect: a CPU has no device graphs",
    "--attention-backend aiter: no such provider of attention_prefill and attention_decode on cpu; reference is bound",
    "SGLANG_USE_AITER is not read here",
)
DONE = {
    "tp": "2",
    "pp": "2",
    "nnodes": "2",
    "dist_timeout": "3600",
    "chunked_prefill_size": "8192",
    "watchdog_timeout": "1200",
    "mem_fraction": "0.95",
    "all_reduce": "library",
    "host": "0.0.0.0",
    "kv_cache_dtype": "fp8_e4m3",
    "max_running_requests": "16",
    "reasoning_parser": "qwen3",
    "tool_call_parser": "qwen3_coder",
}


class ReferenceLaunch(TwoNodes):
    """Both nodes by the launch above, with its environment."""

    def start_node(self, rank: int, address: str, *more: str) -> Node:
        self.work_dir.mkdir(parents=True, exist_ok=True)
        words = LAUNCH.format(model=self.model, rank=rank, address=address, port=0).split()
        env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"} | ENVIRONMENT
        log = self.work_dir / f"node-{rank}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "rocm_serve", "serve", *words, *more],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=env,
                cwd=self.work_dir,
            )
        self.nodes.append(Node(rank, log, process))
        return self.nodes[-1]


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReferenceLaunch]:
    root = tmp_path_factory.mktemp("reference")
    model = small_checkpoint(root / "model", "text-fp8", "bf16", seed=5)
    with ReferenceLaunch(model, root / "nodes") as nodes:
        nodes.await_ready()
        yield nodes


def metrics_of(text: str) -> dict[str, float]:
    """Every sample of a /metrics page; labels are part of the key."""
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return {sample.name + "".join(f"[{value}]" for value in sample.labels.values()): sample.value for sample in samples}


def test_every_flag_is_taken_and_none_is_dropped_in_silence(launch: ReferenceLaunch) -> None:
    for node in launch.nodes:
        decided = dict(re.findall(r"^\S+ (\w+) = (\S*)", node.log, re.MULTILINE))
        assert {key: decided.get(key) for key in DONE} == DONE
        for line in TOLD:
            assert node.log.count(line) == 1, line
    with launch.client() as client:
        (card,) = client.get("/v1/models").json()["data"]
        assert card["id"] == str(launch.model)  # what lm_eval sends as model=PATH
        answer = client.post("/v1/completions", json={"model": card["id"], "prompt": ["1 + 1 ="], "max_tokens": 4})
        assert answer.status_code == 200, answer.text


async def ask(client: httpx.AsyncClient, model: str, number: int) -> httpx.Response:
    """POST what lm_eval's local-completions posts for a question of gsm8k."""
    body: dict[str, Any] = {
        "prompt": [f"Question: What is {number} plus {number}?\nAnswer:"],
        "model": model,
        "max_tokens": 3,
        "temperature": 0.0,
        "stop": ["Question:", "</s>", "<|im_end|>"],
        "seed": 1234,
    }
    return await client.post("/v1/completions", json=body)


async def crowd(launch: ReferenceLaunch) -> tuple[list[int], dict[str, float], dict[str, float]]:
    """Ask all at once, with a rank stopped until all are known to the engine core.

    Returns every status, and the metrics of that moment and after the last answer.
    """
    limits = httpx.Limits(max_connections=None)
    async with (
        httpx.AsyncClient(base_url=launch.base_url, timeout=280, limits=limits) as client,
        httpx.AsyncClient(base_url=launch.base_url, timeout=60) as watcher,
    ):

        async def look() -> dict[str, float]:
            return metrics_of((await watcher.get("/metrics")).text)

        launch.signal("rank-0", signal.SIGSTOP)
        try:
            asking = [asyncio.create_task(ask(client, str(launch.model), number)) for number in range(CLIENTS)]
            async with asyncio.timeout(120):
                while (full := await look())["rocm_serve_running"] + full["rocm_serve_waiting"] < CLIENTS:
                    await asyncio.sleep(0.1)
        finally:
            launch.signal("rank-0", signal.SIGCONT)
        answers = await asyncio.gather(*asking)
        return [answer.status_code for answer in answers], full, await look()


def test_256_clients_wait_for_16_places_and_none_is_turned_away(launch: ReferenceLaunch) -> None:
    with launch.client() as client:
        before = metrics_of(client.get("/metrics").text)
    statuses, full, after = asyncio.run(crowd(launch))
    assert statuses == [200] * CLIENTS
    assert full["rocm_serve_open"] == CLIENTS and full["rocm_serve_waiting"] >= CLIENTS - RUNNING
    assert after["rocm_serve_peak_running"] == RUNNING
    for status in ("429", "503"):
        assert after[f"rocm_serve_http_errors_total[{status}]"] == 0
    assert after["rocm_serve_finished_requests_total"] - before["rocm_serve_finished_requests_total"] == CLIENTS
    assert after["rocm_serve_aborted_requests_total"] == before["rocm_serve_aborted_requests_total"]


def test_a_sigterm_ends_both_nodes_with_0(launch: ReferenceLaunch) -> None:
    launch.signal("node-0", signal.SIGTERM)
    assert launch.end(60) == (0, 0)
