"""Clients that mean harm, or are broken, against real processes: what others get, and what the server comes to hold.

The workers have no model, so that tokens come fast. All scenes share one server, and SIGTERM among 64 streams ends it.
"""

from __future__ import annotations

import asyncio
import re
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.harness import Server
from tests.e2e.leftovers import Held, at_rest, back_to, restored_s
from tests.e2e.soak import MB, NULL_PROGRAM
from tests.e2e.wire import Reply, Wire, request_bytes

pytestmark = pytest.mark.multirank

SOFT_LIMIT = 512  # of open files, when the server starts; many a shell has 1024
IDLE = 1000
CHOICES = 32
FLAGS = ("--pp", "2", "--max-running-requests", "64", "--chunked-prefill-size", "512", "--max-model-len", "8192")


@pytest.fixture(scope="module")
def server(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert hard == resource.RLIM_INFINITY or hard >= 2 * IDLE, "this test opens many sockets"
    server = Server(checkpoints["text-bf16"], tmp_path_factory.mktemp("attacks"), FLAGS, program=NULL_PROGRAM)
    resource.setrlimit(resource.RLIMIT_NOFILE, (SOFT_LIMIT, hard))
    try:
        server.start()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * IDLE), hard))
    with ExitStack() as ending:
        ending.callback(lambda: server.over or server.stop())
        yield server


@pytest.fixture(scope="module")
def baseline(server: Server) -> Held:
    assert asyncio.run(ask(server, stream_of(4))).status == 200
    return at_rest(server)


def stream_of(tokens: int, **more: Any) -> bytes:
    body = {"prompt": "Hello", "max_tokens": tokens, "ignore_eos": True, "stream": True}
    return request_bytes("/v1/completions", body | more)


async def ask(server: Server, data: bytes) -> Reply:
    with closing(await Wire.open(server.base_url)) as wire:
        await wire.send(data)
        return await wire.reply()


def ends_of(reply: Reply) -> list[str]:
    """The finish reasons of all choices of a stream."""
    return [choice["finish_reason"] for event in reply.events for choice in event["choices"] if choice["finish_reason"]]


def grown(server: Server, baseline: Held) -> float:
    """MiB that the server's own process has grown by."""
    return (psutil.Process(server.pid).memory_info().rss - baseline.rss[server.pid]) / MB


def test_a_thousand_idle_connections_are_in_nobodys_way(server: Server, baseline: Held) -> None:
    async def scene() -> None:
        with ExitStack() as held:
            for place in range(IDLE):
                wire = held.enter_context(closing(await Wire.open(server.base_url)))
                if place % 2:
                    await wire.send(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Slow: ")
            replies = await asyncio.gather(*(ask(server, stream_of(8)) for _ in range(32)))
            assert [ends_of(reply) for reply in replies] == [["length"]] * 32
            assert grown(server, baseline) < 64

    asyncio.run(scene())
    back_to(server, baseline)


def test_a_head_without_an_end_is_refused_and_costs_no_memory(server: Server, baseline: Held) -> None:
    async def endless() -> None:
        with closing(await Wire.open(server.base_url)) as wire:
            await wire.send(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n")
            with pytest.raises(ConnectionError):
                for place in range(64):
                    await wire.send(b"X-%d: " % place + b"y" * MB + b"\r\n")

    async def scene() -> None:
        await asyncio.gather(*(endless() for _ in range(8)))

    asyncio.run(scene())
    assert grown(server, baseline) < 64
    assert asyncio.run(ask(server, stream_of(2))).status == 200
    back_to(server, baseline)


def test_a_stream_that_nobody_reads_costs_what_it_asked_for_at_most(server: Server, baseline: Held) -> None:
    """One stream of 6 MB: more than the kernel keeps for a client, which is 4 MB."""

    async def scene() -> None:
        with ExitStack() as held:
            sock = held.enter_context(socket.socket())
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(("127.0.0.1", int(server.base_url.rpartition(":")[2])))
            sock.sendall(stream_of(400, logprobs=5, n=CHOICES))
            while server.metrics()["rocm_serve_finished_requests_total"] < before + CHOICES:
                await asyncio.sleep(0.1)
            others = await asyncio.gather(*(ask(server, stream_of(8)) for _ in range(8)))
            assert [reply.status for reply in others] == [200] * 8
            metrics = server.metrics()
            assert metrics["rocm_serve_pages_used"] == 0 and metrics["rocm_serve_open"] == CHOICES
            print(f"an unread stream; the server has grown by {grown(server, baseline):.0f} MiB")
            assert grown(server, baseline) < 64

    before = server.metrics()["rocm_serve_finished_requests_total"]
    asyncio.run(scene())
    print(f"restored after {restored_s(server):.2f} s")
    back_to(server, baseline)


def test_sigterm_among_64_streams_lets_all_of_them_end(server: Server) -> None:
    async def scene() -> list[Reply]:
        async def read(wire: Wire) -> Reply:
            status, headers = await wire.head()
            began.append(wire)
            body = b""
            while chunk := await wire.chunk():
                body += chunk
            return Reply(status, headers, body)

        began: list[Wire] = []
        with ExitStack() as held:
            wires = [held.enter_context(closing(await Wire.open(server.base_url))) for _ in range(64)]
            for wire in wires:
                await wire.send(stream_of(200))
            reads = [asyncio.create_task(read(wire)) for wire in wires]
            while len(began) < 64:
                await asyncio.sleep(0.01)
            stop = asyncio.create_task(asyncio.to_thread(server.stop))
            replies = await asyncio.gather(*reads)
            await stop
        return replies

    replies = asyncio.run(scene())
    for reply in replies:
        assert ends_of(reply) == ["length"]
    (told,) = re.findall(r"draining (\d+) answers", server.log)
    assert int(told) >= 32, "they were under way when the signal came"
