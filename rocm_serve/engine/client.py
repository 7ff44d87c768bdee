"""The server's view of the engine: requests in, an async iterator of outputs back. asyncio, no torch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Literal

from rocm_serve.engine.link import ClientLink
from rocm_serve.messages import (
    WIRE_VERSION,
    AbortRequests,
    AddRequest,
    CoreFailed,
    CoreReady,
    CoreStopped,
    Drain,
    EffectiveLimits,
    FromCore,
    Output,
    Outputs,
    Stats,
)
from rocm_serve.types import FinishReason

State = Literal["starting", "ready", "draining", "dead"]


class EngineDead(RuntimeError):
    """The engine did not come up, or is gone. The message says why."""


class _Mail:
    """What has come for one request and has not been fetched. The output that ends the request is the last one."""

    __slots__ = ("_outputs", "_over", "_waiter")

    def __init__(self) -> None:
        self._outputs: list[Output] = []
        self._over = False
        self._waiter: asyncio.Future[None] | None = None

    def put(self, output: Output) -> None:
        if self._over:
            return
        self._over = output.finish_reason is not None
        self._outputs.append(output)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> list[Output]:
        """Wait for a first output and return all there are."""
        if not self._outputs:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
            self._waiter = None
        outputs, self._outputs = self._outputs, []
        return outputs


class EngineClient:
    """Speak with the engine core of `run_dir`. All methods belong to one event loop.

    `state`: starting -> ready -> draining -> dead, or dead at any time. `error` says why it died; None after a drain.
    """

    def __init__(self, run_dir: str) -> None:
        self.state: State = "starting"
        self.error: str | None = None
        self.stats = Stats()
        self._limits: EffectiveLimits | None = None
        self._link = ClientLink(run_dir)
        self._open: dict[str, _Mail] = {}
        self._complete: set[str] = set()  # open still, and the core has been told to stop
        self._listens = False
        self._changed = asyncio.Event()

    @property
    def limits(self) -> EffectiveLimits:
        """Errors: RuntimeError before the engine is ready."""
        if self._limits is None:
            raise RuntimeError("the engine has not said its limits yet")
        return self._limits

    @property
    def num_open(self) -> int:
        """Requests whose iterator has not ended: running, waiting, or on their way."""
        return len(self._open)

    async def start(self) -> EffectiveLimits:
        """Wait until the engine is ready. Errors: EngineDead, with the engine's own sentence."""
        if not self._listens:
            self._listens = True
            self._link.listen(self._take, self.fail)
        while self.state == "starting":
            await self._wait_for_change()
        if self.state == "dead":
            raise EngineDead(self.error or "the engine has stopped")
        return self.limits

    async def generate(self, request: AddRequest) -> AsyncGenerator[Output, None]:
        """Yield what the engine says about this request, one by one. All else as `batches`."""
        async with aclosing(self.batches(request)) as batches:
            async for outputs in batches:
                for output in outputs:
                    yield output

    async def batches(self, request: AddRequest) -> AsyncGenerator[list[Output], None]:
        """Yield what the engine says about this request, each time all that has come; the last has `finish_reason`.

        Closing the iterator early, or cancelling who waits for it, aborts the request. If the engine dies, or refuses
        the request, the last output has reason ERROR and the sentence.
        Errors: ValueError if the id is in use.
        """
        request_id = request.request_id
        if request_id in self._open:
            raise ValueError(f"request id {request_id!r} is already in use")
        if self.state != "ready":
            yield [_error(request_id, self._refusal())]
            return
        mail = self._open[request_id] = _Mail()
        over = False
        try:
            self._link.send(request)
            while not over:
                outputs = await mail.take()
                over = outputs[-1].finish_reason is not None
                yield outputs
        finally:
            if not over and request_id not in self._complete:
                self.abort((request_id,))
            self._complete.discard(request_id)
            del self._open[request_id]

    def complete(self, request_id: str) -> None:
        """Stop the engine's work on an open request whose answer is complete: the text met a stop string."""
        if request_id in self._open and self.state in ("ready", "draining"):
            self._complete.add(request_id)
            self._link.send(AbortRequests((request_id,), finished=True))

    def abort(self, request_ids: Iterable[str]) -> None:
        """End these requests. One that somebody still iterates over ends with reason ABORT; unknown ids are fine."""
        ids = tuple(request_ids)
        if self.state in ("ready", "draining"):
            self._link.send(AbortRequests(ids))
        for request_id in ids:
            mail = self._open.get(request_id)
            if mail is not None:
                mail.put(Output(request_id, finish_reason=FinishReason.ABORT))

    async def drain(self) -> None:
        """Take no new request, let the open ones end, stop the engine; return when it has stopped or died."""
        if self.state == "ready":
            self.state = "draining"
            self._link.send(Drain())
        while self.state != "dead":
            await self._wait_for_change()

    def fail(self, reason: str) -> None:
        """End every request with ERROR: the engine is gone. The first reason is kept. For the supervisor."""
        if self.state != "dead":
            self._die(reason)

    async def close(self) -> None:
        """Stop listening and free the sockets; what is still open ends with ERROR."""
        self.fail("the server has closed its link to the engine")
        self._link.close()

    def _take(self, message: FromCore) -> None:
        if self.state == "dead":
            return
        if isinstance(message, Outputs):
            self.stats = message.stats
            for output in message.outputs:
                mail = self._open.get(output.request_id)
                if mail is not None:
                    mail.put(output)
        elif isinstance(message, CoreReady):
            if message.version != WIRE_VERSION:
                self.fail(f"the engine core speaks wire version {message.version}, the server {WIRE_VERSION}")
                return
            self._limits = message.limits
            if self.state == "starting":
                self.state = "ready"
            self._changed.set()
        elif isinstance(message, CoreFailed):
            self.fail(message.error)
        else:
            assert isinstance(message, CoreStopped), message
            self._die(None)

    def _die(self, reason: str | None) -> None:
        self.state = "dead"
        self.error = reason
        for request_id, mail in self._open.items():
            mail.put(_error(request_id, self._refusal()))
        self._changed.set()

    def _refusal(self) -> str:
        if self.state == "dead":
            return self.error or "the engine has stopped"
        return "the server is shutting down" if self.state == "draining" else "the engine is still starting"

    async def _wait_for_change(self) -> None:
        self._changed.clear()
        await self._changed.wait()


def _error(request_id: str, sentence: str) -> Output:
    return Output(request_id, finish_reason=FinishReason.ERROR, error=sentence)
