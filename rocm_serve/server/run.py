"""Run the app under uvicorn: /health at once, requests when the engine is ready, a clean end on SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import threading
from collections.abc import Callable, Collection, Coroutine, Generator, Iterator
from typing import cast

import uvicorn

from rocm_serve.errors import UserError
from rocm_serve.messages import EffectiveLimits
from rocm_serve.server.app import create_app
from rocm_serve.server.connections import SILENT_S, Connection, allow_descriptors, close_silent, guard, hang_up
from rocm_serve.server.context import Context
from rocm_serve.server.info import EngineClientProtocol, ServerInfo
from rocm_serve.server.limits import Gate
from rocm_serve.tokens.tokenizer import Tokenizer

OnReady = Callable[[str, EffectiveLimits], None]

_log = logging.getLogger("rocm_serve.server")
_POLL_S = 0.1
_DEAD_GRACE_S = 2.0  # long enough for a probe to read the 503 and for open answers to end with their error
_NOTHING_OPEN_S = 5.0  # for an end that costs no answer, however often it was asked for
_LAST_WORDS_S = 1.0  # for the errors of answers that are cut off to reach their clients


def bind(host: str, port: int) -> socket.socket:
    """Return a listening address; port 0 takes a free one. Errors: UserError if it cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio looks for this protocol before it turns Nagle's algorithm off, which holds each token for 40 ms
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    guard(sock)
    try:
        sock.bind((host, port))
        sock.listen()  # here, not later: SO_REUSEADDR lets two bind a port on which nobody listens yet
    except OSError as error:
        sock.close()
        raise UserError(f"cannot listen on {host} port {port}: {error.strerror or error}") from error
    return sock


def url_of(sock: socket.socket) -> str:
    """Return the address as a URL that a client on this host can use."""
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield  # `_Stop` handles them: SIGTERM drains first


class _Stop:
    """What asks the server to end, and how often it was asked."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.insisted = asyncio.Event()

    def signal(self) -> None:
        (self.insisted if self.asked.is_set() else self.asked).set()

    @contextlib.contextmanager
    def on_signals(self) -> Iterator[None]:
        """Listen to SIGTERM and SIGINT; only a main thread can."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGTERM, signal.SIGINT)
        for number in numbers:
            loop.add_signal_handler(number, self.signal)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)


def run(
    make_client: Callable[[], EngineClientProtocol],
    tokenizer: Tokenizer,
    info: ServerInfo,
    sock: socket.socket,
    *,
    on_ready: OnReady,
    drain_timeout_s: float = 600.0,
) -> int:
    """Serve until SIGTERM or SIGINT, or until the engine dies; return the process's exit code.

    0: stopped as asked, every accepted request answered. 1: the engine failed, or answers were cut off by a second
    signal or by `drain_timeout_s`. While open answers end, new work gets 503 and /health goes on.
    `make_client` is called inside the event loop; `on_ready` once, with the URL. A death before that is the caller's to
    tell: it may be a wish that cannot be met.
    """

    async def main() -> int:
        client = make_client()
        return await serve(client, tokenizer, info, sock, on_ready=on_ready, drain_timeout_s=drain_timeout_s)

    with asyncio.Runner(loop_factory=uvicorn.Config("", loop="auto").get_loop_factory()) as runner:
        return runner.run(main())


async def serve(
    client: EngineClientProtocol,
    tokenizer: Tokenizer,
    info: ServerInfo,
    sock: socket.socket,
    *,
    on_ready: OnReady,
    drain_timeout_s: float = 600.0,
) -> int:
    """Be `run` inside a running event loop."""
    app = create_app(client, tokenizer, info)
    context: Context = app.state.context
    config = uvicorn.Config(app, lifespan="off", log_level="warning", access_log=False, timeout_keep_alive=75)
    server = _Server(config)
    connections = cast(Collection[Connection], server.server_state.connections)
    allow_descriptors(context.gate.capacity)
    stop = _Stop()
    with stop.on_signals():
        http = asyncio.create_task(server.serve(sockets=[sock]))
        reaper = asyncio.create_task(close_silent(connections, SILENT_S))
        try:
            was_ready = False

            def ready(limits: EffectiveLimits) -> None:
                nonlocal was_ready
                was_ready = True
                on_ready(url_of(sock), limits)

            died = await _until_end(client, stop, http, ready)
            if died:
                if was_ready:
                    _log.error("the engine is dead: %s", client.error or "no reason given")
                await _first_of(stop.asked.wait(), asyncio.sleep(_DEAD_GRACE_S))
            elif client.state == "ready":
                _log.info("draining %d answers", context.gate.num_open)
            context.gate.draining = True

            async def end() -> None:
                await context.gate.until_empty()
                if client.state in ("ready", "draining"):
                    await client.drain()
                server.should_exit = True  # closes the listener; responses on their way are still sent
                await asyncio.wait({http}, timeout=_NOTHING_OPEN_S)
                hang_up(connections)  # on those whose request is not even here
                await asyncio.shield(http)

            drained = await _drain(end(), context.gate, stop, 1.0 if died else drain_timeout_s)
            failed = client.error is not None
        finally:
            server.should_exit = True
            await client.close()  # what is still open ends with an error that its client can read
            await asyncio.wait({http}, timeout=_LAST_WORDS_S)
            for task in (http, reaper, *server.server_state.tasks):
                task.cancel()
            await asyncio.gather(http, reaper, return_exceptions=True)
    return 1 if died or failed or not drained else 0


async def _until_end(
    client: EngineClientProtocol, stop: _Stop, http: asyncio.Task[None], ready: Callable[[EffectiveLimits], None]
) -> bool:
    """Start the engine and wait; return True if it died, False if a stop was asked for."""
    start = asyncio.create_task(client.start())
    asked = asyncio.create_task(stop.asked.wait())
    try:
        await asyncio.wait({start, asked, http}, return_when=asyncio.FIRST_COMPLETED)
        if http.done():
            http.result()
            raise RuntimeError("the HTTP server ended by itself")
        if asked.done():
            return False
        try:
            limits = start.result()
        except RuntimeError:
            return True  # `client.error` is its sentence
        ready(limits)
        while client.state != "dead" and not asked.done():
            await asyncio.wait({asked}, timeout=_POLL_S)
        return not asked.done()
    finally:
        for task in (start, asked):
            task.cancel()
        await asyncio.gather(start, asked, return_exceptions=True)


async def _drain(end: Coroutine[None, None, None], gate: Gate, stop: _Stop, timeout_s: float) -> bool:
    """Wait for the orderly `end`; return False if that was cut short."""
    over = asyncio.create_task(end)
    await _first_of(asyncio.wait({over}, timeout=timeout_s), stop.insisted.wait())
    if not over.done() and not gate.num_open:
        await asyncio.wait({over}, timeout=_NOTHING_OPEN_S)
    if over.done():
        over.result()
        return True
    over.cancel()
    await asyncio.gather(over, return_exceptions=True)
    _log.warning("open requests were cut off: asked twice to stop, or not done within %.0f s", timeout_s)
    return False


async def _first_of(*waits: Coroutine[object, object, object]) -> None:
    """Wait until one of them is over and cancel the others."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
