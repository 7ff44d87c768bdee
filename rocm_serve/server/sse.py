"""Server-sent events: a response that stops its work when the reader goes away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from fastapi import Response
from starlette.types import Receive, Scope, Send

DONE = b"data: [DONE]\n\n"
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


async def until_disconnect(receive: Receive) -> None:
    """Return when the client has gone. The request body has been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Send ready-made events. A disconnect cancels the generator where it waits, so its `finally` aborts the work."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], on_end: Callable[[], None]) -> None:
        super().__init__(headers=_HEADERS)
        del self.headers["content-length"]
        self._events = events
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pump = asyncio.create_task(self._pump(send))
        watch = asyncio.create_task(until_disconnect(receive))
        try:
            await asyncio.wait({pump, watch}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            pump.cancel()
            watch.cancel()
            await asyncio.gather(pump, watch, return_exceptions=True)
            self._on_end()
        if not pump.cancelled():
            pump.result()

    async def _pump(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for data in events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
