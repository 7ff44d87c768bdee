"""Two nodes of one GPU each over NCCL or RCCL: near the CPU's answers, quiet when idle, and one death for all."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from rocm_serve.checkpoint.synthetic import make_checkpoint
from tests.e2e.harness import Server
from tests.e2e.two_nodes import completion, serving

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.device_count() < 2, reason="fewer than two GPUs"),
]

FLAGS = ["--tp", "1", "--pp", "2", "--max-model-len", "4096", "--max-running-requests", "4", "--dtype", "float32"]
ONE_GPU_EACH = {rank: {"CUDA_VISIBLE_DEVICES": str(rank)} for rank in (0, 1)}
NEAR = 1e-4
DEADLINE_S = 8
PROMPTS = [[5, 6, 7], list(range(100, 350)), [9] * 65]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("gpu") / "tiny", "text-bf16", "bf16", seed=11, layers=4)


def scores(client: Any) -> list[float]:
    """Log-probs of the prompts: tokens that come after may differ where two are nearly equal."""
    asked = {"max_tokens": 1, "logprobs": 1, "echo": True}
    answers = [completion(client, prompt, **asked)["choices"][0]["logprobs"] for prompt in PROMPTS]
    return [value for answer in answers for value in answer["token_logprobs"][1:-1]]


def test_near_the_cpu_and_idle_for_longer_than_every_guard_then_an_orderly_end(model: Path, tmp_path: Path) -> None:
    with Server(model, tmp_path / "cpu", [*FLAGS[4:], "--device", "cpu"]) as one, one.client() as client:
        expected = scores(client)
    env = {rank: {**more, "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "5"} for rank, more in ONE_GPU_EACH.items()}
    flags = [*FLAGS, "--watchdog-timeout", "5", "--dist-timeout", "20"]
    with serving(model, tmp_path / "gpus", flags, env) as nodes:
        for _ in range(2):
            with nodes.client() as client:
                assert scores(client) == pytest.approx(expected, abs=NEAR)
            time.sleep(25)
            assert nodes.health() == 200
        nodes.signal("node-1", signal.SIGTERM)
        assert nodes.end(30) == (0, 0)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("name", ["rank-0", "rank-1"])
def test_a_rank_that_dies_or_stands_still_on_a_gpu_ends_both_nodes(
    model: Path, tmp_path: Path, name: str, how: signal.Signals
) -> None:
    with serving(model, tmp_path, [*FLAGS, "--watchdog-timeout", str(DEADLINE_S)], ONE_GPU_EACH) as nodes:
        got: list[dict[str, Any]] = []

        def ask() -> None:
            with nodes.client() as client:
                got.append(completion(client, [5, 6, 7], max_tokens=3000))

        thread = threading.Thread(target=ask)
        thread.start()
        nodes.until(lambda: (seen := nodes.progress(name)) is not None and seen.step >= 100, 60, "no decode")
        nodes.signal(name, how)
        found_s = nodes.until(lambda: nodes.health() == 503, DEADLINE_S + 15, "/health still well")
        thread.join(30)
        ended_s = nodes.until(lambda: all(n.process.poll() is not None for n in nodes.nodes), 20, "no end")
        print(f"{name} {how.name}: 503 after {found_s:.1f} s, ended {ended_s:.1f} s later: {got}")
        assert nodes.end(1) == (1, 1)
        assert name.replace("-", " ") in got[0]["error"]["message"].replace("-", " ")
