"""Many clients at once on TP2 x PP2, also ahead of tokens: each answer has the bits of its alone run; nothing stays."""

from __future__ import annotations

import asyncio
import json
import random
import secrets
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from rocm_serve.trace import StageTrace, StepTrace, read_trace
from tests.e2e.harness import Server

pytestmark = pytest.mark.multirank

REQUESTS = 64
ABORTED = 8
AGAIN = 10  # asked once more, alone: others in every run, for all of them take minutes
# 200 pages of 4 tokens: forty requests start in four pages each at most and grow to ten, past what is there.
FLAGS = ("--tp", 2, "--pp", 2, "--dtype", "float32", "--chunked-prefill-size", 64, "--max-model-len", 256)
LIMITS = ("--max-running-requests", 40, "--page-size", 4, "--max-total-tokens", 200 * 4)

Body = dict[str, Any]


def mixed_bodies(rng: random.Random, vocab: int, hosted_from: int = 0) -> list[Body]:
    """Prompts of 1 to 100 ids, most of them short; greedy and seeded, filtered and penalised, scored and not.

    Before number `hosted_from` none is scored or penalised.
    """
    bodies = []
    for i in range(REQUESTS):
        length = rng.randint(70, 100) if i % 16 == 15 else rng.randint(1, 14)
        body: Body = {
            "prompt": [rng.randrange(vocab) for _ in range(length)],
            "max_tokens": rng.randint(24, 32) if i % 8 in (1, 2, 3, 5, 7) else rng.randint(3, 6),
            "temperature": 0 if i % 3 == 0 else 1.0,
            "seed": i,
            "ignore_eos": i % 5 != 0,
            "logprobs": 3 if i % 2 and i >= hosted_from else None,
            "echo": i % 4 == 1,
        }
        if i % 3 == 1:
            body |= {"top_p": 0.9, "top_k": 50}
        if i % 7 == 2 and i >= hosted_from:
            body |= {"repetition_penalty": 1.2, "presence_penalty": 0.5}
        if i % 11 == 3:
            body |= {"n": 2}
        bodies.append(body)
    return bodies


async def answer(client: httpx.AsyncClient, body: Body) -> Any:
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()["choices"]


async def cut_off(client: httpx.AsyncClient, body: Body) -> None:
    """Read the first chunk of a stream and go away; every other one goes away before it."""
    async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
        assert response.status_code == 200
        if len(body["prompt"]) % 2:
            await anext(response.aiter_lines())


async def streamed(client: httpx.AsyncClient, body: Body) -> list[str]:
    """Return the text of each choice, put together from its chunks."""
    texts = [""] * body.get("n", 1)
    async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line.removeprefix("data: "))["choices"]:
                    texts[choice["index"]] += choice["text"]
    return texts


def known(metrics: dict[str, float]) -> float:
    """Return how many answers the engine core knows of that are not over."""
    return metrics["rocm_serve_running"] + metrics["rocm_serve_waiting"]


def until(server: Server, holds: Callable[[dict[str, float]], bool], seconds: float = 60.0) -> dict[str, float]:
    deadline = time.monotonic() + seconds
    while not holds(metrics := server.metrics()):
        assert time.monotonic() < deadline, {k: v for k, v in metrics.items() if "_bucket" not in k}
        time.sleep(0.1)
    return metrics


@pytest.mark.timeout(600)
@pytest.mark.parametrize("ahead", [False, True], ids=["stages", "ahead"])
def test_64_mixed_requests_have_the_bits_of_their_alone_runs(
    checkpoints: dict[str, Path], tmp_path: Path, ahead: bool
) -> None:
    """Planned ahead: until the turn of the last eight comes, which need the host for every step."""
    rng, seed = random.Random(20), secrets.randbits(32)
    print(f"asked again by seed {seed}")
    flags = [str(word) for word in (*FLAGS, *LIMITS)]
    trace = tmp_path / "trace"
    if ahead:
        flags += ["--plan-ahead", "on", "--trace", str(trace)]
    with Server(checkpoints["text-fp8"], tmp_path, flags) as server:
        bodies = mixed_bodies(rng, 2000, REQUESTS - 8 if ahead else 0)
        given_up = {i for i in range(REQUESTS) if i % (REQUESTS // ABORTED) == 6}
        streams = {i for i in range(REQUESTS) if i % 8 == 4 and not bodies[i]["echo"]}

        async def together() -> list[Any]:
            limits = httpx.Limits(max_connections=None)
            async with httpx.AsyncClient(base_url=server.base_url, timeout=300, limits=limits) as client:
                with server.held():
                    jobs = []
                    for i, body in enumerate(bodies):
                        if i == REQUESTS - 8:
                            await asyncio.to_thread(until, server, lambda m: known(m) >= REQUESTS - 8 - ABORTED)
                        job = cut_off if i in given_up else streamed if i in streams else answer
                        jobs.append(asyncio.create_task(job(client, body)))
                    await asyncio.to_thread(until, server, lambda m: known(m) >= REQUESTS - ABORTED)
                return await asyncio.gather(*jobs)

        again = sorted(random.Random(seed).sample(sorted(set(range(REQUESTS)) - given_up), AGAIN))

        async def alone() -> dict[int, Any]:
            async with httpx.AsyncClient(base_url=server.base_url, timeout=300) as client:
                return {i: await answer(client, bodies[i]) for i in again}

        crowd = asyncio.run(together())
        metrics = until(server, lambda m: m["rocm_serve_running"] == 0)
        assert metrics["rocm_serve_peak_running"] >= 32
        assert metrics['rocm_serve_steps_total{kind="mixed"}'] > 0
        assert metrics["rocm_serve_preemptions_total"] >= 1
        for gauge in ("waiting", "pages_used", "slots_used"):
            assert metrics[f"rocm_serve_{gauge}"] == 0, gauge
        print({name: value for name, value in metrics.items() if "steps_total" in name or "preempt" in name})

        for i, expected in asyncio.run(alone()).items():
            if i in streams:
                assert crowd[i] == [choice["text"] for choice in expected], f"request {i}, streamed"
            else:
                assert crowd[i] == expected, f"request {i}"
    if ahead:
        depths = Counter(step.in_flight for step in read_trace(trace / "core.jsonl", StepTrace))
        assert depths[3] > 10, f"steps planned with so many in flight, themselves counted: {depths}"


def busy_in_both(stages: list[list[StageTrace]], seqs: range) -> int:
    """Count steps of the last stage during which the first stage computed another one."""
    first, last = stages
    spans = [(step.seq, step.started_ns, step.ended_ns) for step in first]
    return sum(
        any(seq != step.seq and start < step.ended_ns and step.started_ns < end for seq, start, end in spans)
        for step in last
        if step.seq in seqs
    )


@pytest.mark.timeout(600)
def test_32_decoding_requests_keep_both_stages_busy(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """A trace of every step: plans of 16 +- 1, and the stages work on two of them at the same time."""
    new_tokens = 24
    flags = ("--pp", "2", "--dtype", "float32", "--max-model-len", "256", "--trace", str(tmp_path))
    with Server(checkpoints["text-fp8"], tmp_path, flags) as server:
        prompts = [[i, i + 1, i + 2] for i in range(32)]
        body = {"prompt": prompts, "max_tokens": new_tokens, "temperature": 0, "ignore_eos": True}
        with ThreadPoolExecutor(1) as thread:
            with server.held():
                asked = thread.submit(server.complete, **body)
                until(server, lambda m: known(m) == 32)
            assert len(asked.result()["choices"]) == 32
    steps = read_trace(tmp_path / "core.jsonl", StepTrace)
    decoding = [step for step in steps if step.num_recurrent == step.num_works]
    assert sum(step.num_works for step in decoding) >= 32 * (new_tokens - 2)
    full = decoding[2:-2]  # the first prompts and the last tokens do not come in pairs
    assert {step.num_works for step in full} <= {15, 16, 17}
    stages = [read_trace(tmp_path / f"rank-{rank}.jsonl", StageTrace) for rank in (0, 1)]
    overlapping = busy_in_both(stages, range(full[0].seq, full[-1].seq + 1))
    rows = sorted({step.num_works for step in full})
    print(f"{len(full)} decode steps of {rows} rows; both stages busy in {overlapping}")
    assert overlapping >= len(full) / 2
