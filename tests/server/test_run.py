"""The server on a real socket: disconnects, readiness, SIGTERM, a dead engine."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from rocm_serve.errors import UserError
from rocm_serve.messages import EffectiveLimits
from rocm_serve.server.run import bind, run, serve, url_of
from tests.server.fake_engine import FakeEngine
from tests.server.http import TOKENIZER, VOCAB, error_of, make_info
from tests.server.test_admin import sample

Talk = Callable[[httpx.AsyncClient, FakeEngine], Awaitable[None]]
LONG: dict[str, Any] = {"prompt": "a", "max_tokens": 150, "ignore_eos": True}


class SlowStart(FakeEngine):
    """Not ready until `up` is set; `fault` makes it fail instead."""

    fault: str | None = None

    def __init__(self) -> None:
        super().__init__(VOCAB)
        self.state = "starting"
        self.up = asyncio.Event()

    async def start(self) -> EffectiveLimits:
        await self.up.wait()
        if self.fault is not None:
            self.state, self.error = "dead", self.fault
            raise RuntimeError(self.fault)
        self.state = "ready"
        return self.limits


async def serving(engine: FakeEngine, talk: Talk, *, ready: bool = True, drain_timeout_s: float = 60) -> int:
    """Serve on a free port while `talk` runs; return the exit code. `talk` has to end the server."""
    is_ready = asyncio.Event()
    sock = bind("127.0.0.1", 0)
    url = url_of(sock)

    def on_ready(told: str, limits: EffectiveLimits) -> None:
        assert told == url and limits == engine.limits
        is_ready.set()

    server = asyncio.create_task(
        serve(engine, TOKENIZER, make_info(), sock, on_ready=on_ready, drain_timeout_s=drain_timeout_s)
    )
    if ready:
        await is_ready.wait()
    async with httpx.AsyncClient(base_url=url, timeout=30) as client:
        await talk(client, engine)
    return await server


def run_serving(talk: Talk, **engine: Any) -> int:
    async def main() -> int:
        return await serving(FakeEngine(VOCAB, **engine), talk)

    return asyncio.run(main())


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("when", ["before the first token", "after the first token"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_aborts_its_answers(n: int, when: str, stream: bool) -> None:
    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        if when == "before the first token":
            engine.release.clear()
        body = {**LONG, "n": n, "stream": stream}
        async with httpx.AsyncClient(base_url=client.base_url) as other:
            if stream:
                async with other.stream("POST", "/v1/completions", json=body) as response:
                    if when == "after the first token":
                        await anext(response.aiter_bytes())
                    await until(lambda: len(engine.running) == n)
            else:
                ask = asyncio.create_task(other.post("/v1/completions", json=body))
                await until(lambda: len(engine.running) == n)
                ask.cancel()
        await until(lambda: not engine.running)
        assert len(engine.aborted) == n
        engine.release.set()
        text = (await client.get("/metrics")).text
        assert sample(text, "rocm_serve_running") == sample(text, "rocm_serve_open") == 0
        assert sample(text, 'rocm_serve_requests_total{finish_reason="abort"}') == n
        assert (await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2})).status_code == 200
        terminate()

    assert run_serving(talk, step_s=0.01) == 0


def test_sigterm_finishes_running_and_waiting_answers_and_takes_no_new_work() -> None:
    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        engine.release.clear()

        async def streamed() -> str:
            async with client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
                return "".join([part async for part in response.aiter_text()])

        asks = [asyncio.create_task(client.post("/v1/completions", json=LONG)) for _ in range(4)]
        streams = [asyncio.create_task(streamed()) for _ in range(2)]
        await until(lambda: len(engine.seen) == 6)
        assert len(engine.running) == 2
        terminate()
        async with httpx.AsyncClient(base_url=client.base_url) as other:
            while (await other.get("/health")).json() != {"status": "draining"}:
                await asyncio.sleep(0.01)
        async with httpx.AsyncClient(base_url=client.base_url) as other:  # a new connection
            await asyncio.sleep(0.3)
            assert (await other.get("/health")).status_code == 200
            for refused in (await other.get("/ready"), await other.post("/v1/completions", json=LONG)):
                assert refused.status_code == 503 and error_of(refused)["code"] == "draining"
        assert len(engine.seen) == 6
        engine.release.set()
        for answer in await asyncio.gather(*asks):
            assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 150
        for text in await asyncio.gather(*streams):
            assert text.endswith("data: [DONE]\n\n") and '"finish_reason":"length"' in text
        with pytest.raises(httpx.TransportError):  # the listener closes when the last answer is out
            for _ in range(200):
                async with httpx.AsyncClient(base_url=client.base_url) as other:
                    assert (await other.get("/health")).json() == {"status": "draining"}
                    await asyncio.sleep(0.01)
        assert not engine.aborted

    async def main() -> None:
        engine = FakeEngine(VOCAB, step_s=0.002, max_running=2)
        assert await serving(engine, talk) == 0
        assert engine.calls == ["start", "drain", "close"]

    asyncio.run(main())


def test_a_second_sigterm_cuts_open_answers_off() -> None:
    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        engine.release.clear()
        ask = asyncio.create_task(client.post("/v1/completions", json=LONG))
        await until(lambda: bool(engine.running))
        terminate()
        await asyncio.sleep(0.3)
        assert engine.running
        terminate()
        answer = await ask
        assert answer.status_code == 500 and error_of(answer)["message"] == "the link is closed"

    assert run_serving(talk) == 1


@pytest.mark.parametrize("pause_s", [0.0, 0.05])
def test_two_sigterms_to_an_idle_server_end_it_with_0(pause_s: float) -> None:
    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        assert (await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2})).status_code == 200
        terminate()
        await asyncio.sleep(pause_s)
        terminate()

    assert run_serving(talk) == 0


def test_draining_that_takes_too_long_ends_with_1() -> None:
    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        engine.release.clear()
        ask = asyncio.create_task(client.post("/v1/completions", json=LONG))
        await until(lambda: bool(engine.running))
        terminate()
        await asyncio.gather(ask, return_exceptions=True)

    async def main() -> int:
        return await serving(FakeEngine(VOCAB), talk, drain_timeout_s=0.2)

    assert asyncio.run(main()) == 1


def test_health_is_there_while_the_engine_starts_and_readiness_follows() -> None:
    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        assert isinstance(engine, SlowStart)
        assert (await client.get("/health")).json() == {"status": "starting"}
        response = await client.get("/ready")
        assert response.status_code == 503 and error_of(response)["code"] == "starting"
        engine.up.set()
        await until(lambda: engine.state == "ready")
        assert (await client.get("/ready")).status_code == 200
        terminate()

    async def main() -> int:
        return await serving(SlowStart(), talk, ready=False)

    assert asyncio.run(main()) == 0


def test_sigterm_while_starting_ends_with_0() -> None:
    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        await client.get("/health")
        terminate()

    async def main() -> int:
        return await serving(SlowStart(), talk, ready=False)

    assert asyncio.run(main()) == 0


def test_an_engine_that_cannot_start_ends_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rocm_serve.server.run._DEAD_GRACE_S", 0.0)  # nobody asks here

    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        assert isinstance(engine, SlowStart)
        engine.fault = "shard 2 is truncated"
        engine.up.set()
        await until(lambda: engine.state == "dead")

    async def main() -> int:
        return await serving(SlowStart(), talk, ready=False)

    assert asyncio.run(main()) == 1


def test_an_engine_that_dies_turns_health_to_503_and_ends_with_1() -> None:
    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        engine.state, engine.error = "dead", "rank 1 died"
        response = await client.get("/health")
        assert response.status_code == 503 and "rank 1 died" in error_of(response)["message"]

    assert run_serving(talk) == 1


def test_an_address_in_use_is_the_users_error() -> None:
    with bind("127.0.0.1", 0) as sock, pytest.raises(UserError, match="cannot listen on 127.0.0.1 port"):
        bind("127.0.0.1", sock.getsockname()[1])
    with bind("0.0.0.0", 0) as sock:
        assert url_of(sock) == f"http://127.0.0.1:{sock.getsockname()[1]}"


def test_small_writes_of_a_stream_leave_at_once() -> None:
    """Without TCP_NODELAY a token waits until the client's kernel acknowledges the one before, up to 40 ms."""

    async def story() -> int:
        accepted: asyncio.Future[asyncio.StreamWriter] = asyncio.get_running_loop().create_future()
        async with await asyncio.start_server(lambda _, writer: accepted.set_result(writer), sock=sock):
            _, client = await asyncio.open_connection(*sock.getsockname())
            writer = await accepted
            nodelay: int = writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            for end in (client, writer):
                end.close()
                await end.wait_closed()
        return nodelay

    with bind("127.0.0.1", 0) as sock:
        assert asyncio.run(story())


def test_run_makes_its_own_loop_and_returns_the_exit_code() -> None:
    engines: list[FakeEngine] = []

    def make() -> FakeEngine:
        engines.append(FakeEngine(VOCAB))
        return engines[0]

    def on_ready(url: str, limits: EffectiveLimits) -> None:
        asyncio.get_running_loop().call_later(0.2, terminate)

    assert run(make, TOKENIZER, make_info(), bind("127.0.0.1", 0), on_ready=on_ready) == 0
    assert engines[0].calls == ["start", "drain", "close"]


def test_the_start_of_draining_says_how_many_answers_are_open(caplog: pytest.LogCaptureFixture) -> None:
    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        ask = asyncio.create_task(client.post("/v1/completions", json={**LONG, "n": 2}))
        await until(lambda: len(engine.running) == 2)
        terminate()
        assert (await ask).status_code == 200

    caplog.set_level("INFO", logger="rocm_serve.server")
    assert run_serving(talk, step_s=0.01) == 0
    assert caplog.messages == ["draining 2 answers"]
