"""Who may enter: the queue has an end, and a server that is not ready says so."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from rocm_serve.server.errors import ApiError
from rocm_serve.server.info import EngineClientProtocol, ServerInfo

RETRY_AFTER_S = "1"


class Gate:
    """Admits answers while fewer than running + queued are open; the rest get 429, not an endless queue."""

    def __init__(self, client: EngineClientProtocol, info: ServerInfo) -> None:
        self.capacity = info.max_running_requests + info.max_queued_requests
        self.num_open = 0
        self.draining = False
        self._client = client
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def state(self) -> str:
        """Return starting, ready, draining or dead."""
        state = self._client.state
        if self.draining and (state == "ready" or (state == "dead" and self._client.error is None)):
            return "draining"  # an engine that has drained is gone a moment before its server
        return state

    async def until_empty(self) -> None:
        """Return when no answer is open."""
        await self._empty.wait()

    def check_ready(self) -> None:
        """Errors: ApiError 503 with the reason."""
        state = self.state
        if state == "ready":
            return
        if state == "dead":
            reason = self._client.error or "it has been stopped"
            raise ApiError(503, f"the engine is dead: {reason}", code="engine_dead")
        what = "the server is shutting down" if state == "draining" else "the server is still starting"
        raise ApiError(503, what, code=state, headers={"Retry-After": RETRY_AFTER_S})

    @contextmanager
    def admit(self, num_choices: int) -> Iterator[None]:
        """Hold places for the answers of one request. Errors: ApiError 503 if not ready, 429 if the queue is full."""
        self.check_ready()
        if self.num_open + num_choices > self.capacity:
            message = f"the queue is full: {self.num_open} of {self.capacity} places are taken; try again later"
            raise ApiError(429, message, code="queue_full", headers={"Retry-After": RETRY_AFTER_S})
        self.num_open += num_choices
        self._empty.clear()
        try:
            yield
        finally:
            self.num_open -= num_choices
            if not self.num_open:
                self._empty.set()
