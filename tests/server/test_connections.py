"""Clients that hold a connection and do nothing, on real sockets."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable

import httpx
import pytest

from rocm_serve.server import body, connections, run
from tests.e2e.wire import Wire, request_bytes
from tests.server.fake_engine import FakeEngine
from tests.server.http import VOCAB
from tests.server.test_admin import sample
from tests.server.test_run import LONG, run_serving, serving, terminate

SOON_S = 20.0  # a busy machine; each thing here is due within two seconds
ASK = request_bytes("/v1/completions", {"prompt": "a", "max_tokens": 2, "ignore_eos": True})


async def soon(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.01)


def test_a_client_that_does_not_read_its_stream_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "STALLED_S", 1)

    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect((client.base_url.host, client.base_url.port))
        sock.sendall(request_bytes("/v1/completions", {**LONG, "max_tokens": 190_000, "stream": True}))
        with sock:
            await soon(lambda: len(engine.running) == 1, "the answer has begun")
            await soon(lambda: len(engine.aborted) == 1, "its answer was aborted")
            text = (await client.get("/metrics")).text
            assert sample(text, "rocm_serve_open") == 0
        terminate()

    async def main() -> int:
        return await serving(FakeEngine(VOCAB, max_model_len=200_000, script=[5]), talk)

    assert asyncio.run(main()) == 0


def test_a_connection_without_a_request_is_closed_and_others_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "SILENT_S", 0.6)

    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        url = str(client.base_url)
        engine.release.clear()
        waits = asyncio.create_task(client.post("/v1/completions", json=LONG))
        silent, slow, after_one = [await Wire.open(url) for _ in range(3)]
        await slow.send(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nX-Slow: ")
        await after_one.send(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
        assert (await after_one.reply()).status == 200
        await after_one.send(b"GET /hea")
        async with httpx.AsyncClient(base_url=url) as busy:
            ended = asyncio.gather(*(wire.ended() for wire in (silent, slow, after_one)))
            began = time.monotonic()
            while not ended.done():
                assert time.monotonic() - began < SOON_S, "still connected"
                assert (await busy.get("/health")).status_code == 200
                await asyncio.sleep(0.1)
            assert ended.result() == [True, True, True]
        for wire in (silent, slow, after_one):
            wire.close()
        assert len(engine.running) == 1, "an answer may take longer than that"
        engine.release.set()
        assert (await waits).status_code == 200
        terminate()

    assert run_serving(talk) == 0


def test_a_body_that_does_not_come_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "BODY_S", 0.3)

    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        wire = await Wire.open(str(client.base_url))
        await wire.send(ASK[:-5])
        reply = await wire.reply()
        assert reply.status == 408 and json.loads(reply.body)["error"]["code"] == "request_timeout"
        assert await wire.ended()
        wire.close()
        assert not engine.seen
        terminate()

    assert run_serving(talk) == 0


def test_sigterm_does_not_wait_for_a_body_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_NOTHING_OPEN_S", 0.3)

    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        wire = await Wire.open(str(client.base_url))
        await wire.send(ASK[:-5])
        await asyncio.sleep(0.2)
        terminate()
        assert await wire.ended()
        wire.close()

    began = time.monotonic()
    assert run_serving(talk) == 0
    assert time.monotonic() - began < SOON_S < body.BODY_S


def test_a_half_closed_connection_counts_as_closed() -> None:
    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        engine.release.clear()
        wire = await Wire.open(str(client.base_url))
        await wire.send(ASK)
        await soon(lambda: len(engine.running) == 1, "it runs")
        wire.half_close()
        await soon(lambda: len(engine.aborted) == 1, "it was aborted")
        wire.close()
        terminate()

    assert run_serving(talk) == 0


def test_requests_sent_without_waiting_are_answered_in_their_order() -> None:
    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        wire = await Wire.open(str(client.base_url))
        prompts = [[place] for place in range(20)]
        asks = [request_bytes("/v1/completions", {"prompt": prompt, "max_tokens": 1}) for prompt in prompts]
        await wire.send(b"".join(asks))
        assert [(await wire.reply()).status for _ in asks] == [200] * 20
        assert [list(request.prompt) for request in engine.seen] == prompts
        wire.close()
        terminate()

    assert run_serving(talk) == 0


def test_the_soft_limit_of_open_files_is_raised_and_a_low_hard_one_is_told() -> None:
    code = (
        "import logging, resource\n"
        "from rocm_serve.server.connections import allow_descriptors\n"
        "logging.basicConfig(format='%(message)s')\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 1024))\n"
        "allow_descriptors(700)\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE))\n"
        "allow_descriptors(800)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "(1024, 1024)\n"
    assert done.stderr.count("\n") == 1 and "may open 1024 files" in done.stderr and "800 clients" in done.stderr


def test_a_server_raises_its_limit_before_it_is_ready() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 256
        terminate()

    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        assert run_serving(talk) == 0
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
