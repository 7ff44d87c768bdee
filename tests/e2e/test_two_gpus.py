"""The trained tiny checkpoint on two GPUs of one host, in every way that they can be shared: a crowd with aborts.

Edges are poisoned (poisoned_worker.py). Answers are near one CPU rank's, and the same with device graphs and without;
times of first requests are printed only (evals/bench_gpu/pair.py sets them beside a step).
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.e2e.harness import ROOT, Server
from tests.e2e.test_concurrency import cut_off, until

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.device_count() < 2, reason="fewer than two GPUs"),
]

MODEL = ROOT / "evals" / "tiny" / "checkpoint"
EXACT = ("--dtype", "float32", "--fp8-activation", "bf16", "--max-model-len", "512", "--max-running-requests", "64")
POISONED = ("tests.e2e.poisoned_server",)
REQUESTS, ABORTED_OF = 200, 8
NEAR = 2e-4
EP2 = ("--tp", "2", "--ep", "2", "--expert-exchange")
CELLS = {
    "tp2": ("--tp", "2"),
    "pp2": ("--pp", "2"),
    "ep2-local": (*EP2, "local"),
    "ep2-torch": (*EP2, "torch"),
    "ep2-all_gather": (*EP2, "all_gather"),
    "pp2-mtp": ("--pp", "2", "--speculative", "mtp"),
    "tp2-mtp": ("--tp", "2", "--speculative", "mtp"),
}
CAPTURED = ("tp2", "pp2", "ep2-all_gather", "pp2-mtp")
Body = dict[str, Any]


def bodies() -> list[Body]:
    rng = random.Random(10)
    made = []
    for i in range(REQUESTS):
        length = rng.randint(60, 130) if i % 10 == 9 else rng.randint(1, 20)
        body: Body = {"prompt": [rng.randrange(990) for _ in range(length)], "max_tokens": rng.randint(2, 24)}
        body |= {"temperature": 0 if i % 3 else 1.0, "seed": i, "ignore_eos": True, "logprobs": 3}
        if i % 12 == 6:
            body |= {"top_p": 0.9, "top_k": 50, "repetition_penalty": 1.2}
        made.append(body)
    return made


def scores(server: Server) -> list[list[float]]:
    """Log-probs of prompts: tokens that come after may differ where two are nearly equal."""
    found = []
    for body in [body for body in bodies() if len(body["prompt"]) > 2][:16]:
        answer = server.complete(**body | {"max_tokens": 1, "echo": True})
        found.append(answer["choices"][0]["logprobs"]["token_logprobs"][1:-1])
    return found


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[list[float]]]:
    with Server(MODEL, tmp_path_factory.mktemp("cpu"), [*EXACT, "--device", "cpu"]) as server:
        yield scores(server)


async def crowd(server: Server) -> list[Any]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.base_url, timeout=120, limits=limits) as client:

        async def one(i: int, body: Body) -> Any:
            if i % ABORTED_OF == 6:
                return await cut_off(client, body)
            response = await client.post("/v1/completions", json=body)
            assert response.status_code == 200, response.text
            return response.json()

        return await asyncio.gather(*(one(i, body) for i, body in enumerate(bodies())))


def seconds_of_requests(server: Server, count: int) -> list[float]:
    """Ask one short question after the other."""
    took = []
    for _ in range(count):
        began = time.monotonic()
        server.complete(prompt=[7, 8, 9], max_tokens=4, temperature=0, ignore_eos=True)
        took.append(time.monotonic() - began)
    return took


@pytest.mark.parametrize("cell", CELLS)
def test_a_crowd_with_aborts_is_answered_and_leaves_nothing(
    cell: str, expected: list[list[float]], tmp_path: Path
) -> None:
    flags = (*EXACT, *CELLS[cell], "--mem-fraction", "0.8")
    with Server(MODEL, tmp_path, flags, program=POISONED) as server:
        took = seconds_of_requests(server, 10)
        print(f"{cell}: ms of the first ten requests: {', '.join(f'{1e3 * one:.1f}' for one in took)}")
        began = time.monotonic()
        answers = asyncio.run(crowd(server))
        print(f"{cell}: {REQUESTS} requests in {time.monotonic() - began:.1f} s")
        for i, (body, answer) in enumerate(zip(bodies(), answers, strict=True)):
            if i % ABORTED_OF != 6:
                assert answer["usage"]["completion_tokens"] == body["max_tokens"], f"request {i}"
        metrics = until(server, lambda m: m["rocm_serve_running"] == 0)
        for gauge in ("waiting", "pages_used", "slots_used"):
            assert metrics[f"rocm_serve_{gauge}"] == 0, gauge
        for got, want in zip(scores(server), expected, strict=True):
            assert got == pytest.approx(want, abs=NEAR)


def alone(server: Server) -> list[Any]:
    """Return choices of requests that come one after the other: greedy and drawn, by plain rows and by others."""
    found = []
    for i, body in enumerate(bodies()[:24]):
        asked = body | {"logprobs": 3 if i % 2 else None, "return_tokens_as_token_ids": True}
        found.append(server.complete(**asked)["choices"][0])
    return found


@pytest.mark.parametrize("cell", CAPTURED)
def test_steps_replayed_as_graphs_give_the_tokens_of_steps_without(cell: str, tmp_path: Path) -> None:
    flags = (*EXACT, *CELLS[cell], "--mem-fraction", "0.8")
    with Server(MODEL, tmp_path / "graphs", flags) as server:
        assert "captured in" in server.log, "no step was captured"
        replayed = alone(server)
    with Server(MODEL, tmp_path / "eager", (*flags, "--enforce-eager")) as server:
        assert "captured in" not in server.log
        plain = alone(server)
    furthest = 0.0
    for i, (one, other) in enumerate(zip(replayed, plain, strict=True)):
        assert one["text"] == other["text"], f"request {i}"
        if i % 2:
            assert one["logprobs"]["tokens"] == other["logprobs"]["tokens"], f"request {i}"
            pairs = zip(one["logprobs"]["token_logprobs"], other["logprobs"]["token_logprobs"], strict=True)
            furthest = max([furthest, *(abs(a - b) for a, b in pairs)])
    print(f"{cell}: log-probs with graphs and without differ by {furthest:.1e} at most")
    assert furthest <= NEAR
