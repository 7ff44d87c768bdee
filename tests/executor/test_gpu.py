"""The same stack on GPUs, with whatever providers are bound there: near the CPU's numbers, over NCCL or RCCL too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rocm_serve.config.schema import DeviceName
from rocm_serve.executor.local import LocalExecutor
from rocm_serve.platform.probe import free_port
from tests.executor.generate import Answer, Requests, session
from tests.executor.processes import world
from tests.executor.wishes import resolved

pytestmark = pytest.mark.gpu

# float32 sums in another order, through four layers; the largest difference seen on two H200 was 7e-6.
NEAR = 1e-4


def gpus() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def device() -> DeviceName:
    return "rocm" if torch.version.hip else "cuda"


@pytest.fixture(scope="module")
def greedy(mixed_requests: Requests) -> Requests:
    return {name: (prompt, params) for name, (prompt, params) in mixed_requests.items() if params.temperature == 0.0}


@pytest.fixture(scope="module")
def on_cpu(checkpoint: Path, greedy: Requests) -> dict[str, Answer]:
    with session(LocalExecutor(resolved(model=str(checkpoint)))) as local:
        return local.generate(greedy)


def check_near(answers: dict[str, Answer], expected: dict[str, Answer]) -> None:
    for name, answer in answers.items():
        want = expected[name]
        assert len(answer.tokens) == len(want.tokens)
        for one, other in zip(answer.prompt_logprobs, want.prompt_logprobs, strict=True):
            assert one.token == other.token and abs(one.logprob - other.logprob) < NEAR, name
        for one, other in zip(answer.logprobs, want.logprobs, strict=True):
            if one.token != other.token:
                assert other.top_logprobs[0] - other.top_logprobs[1] < NEAR, name
                break
            assert abs(one.logprob - other.logprob) < NEAR, name


@pytest.mark.skipif(gpus() < 1, reason="no GPU")
def test_one_gpu_is_near_the_cpu(checkpoint: Path, greedy: Requests, on_cpu: dict[str, Answer]) -> None:
    with session(LocalExecutor(resolved(model=str(checkpoint), device=device()))) as local:
        check_near(local.generate(greedy), on_cpu)


@pytest.mark.skipif(gpus() < 2, reason="fewer than two GPUs")
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_two_gpus_are_near_the_cpu(
    checkpoint: Path, greedy: Requests, on_cpu: dict[str, Answer], tmp_path: Path, tp: int, pp: int
) -> None:
    address = f"127.0.0.1:{free_port()}"
    wish = resolved(model=str(checkpoint), device=device(), tp=tp, pp=pp, run_dir=str(tmp_path), dist_init_addr=address)
    with world(wish, tmp_path) as ranks:
        check_near(ranks.session.generate(greedy), on_cpu)
        assert ranks.session.deepest == pp
