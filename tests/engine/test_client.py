"""The client without a wire: what it sends, and how its iterators end. test_core.py has both ends of a real one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from unittest import mock

from rocm_serve.engine.client import EngineClient
from rocm_serve.messages import (
    WIRE_VERSION,
    AbortRequests,
    AddRequest,
    CoreReady,
    FromCore,
    Output,
    Outputs,
    Stats,
    ToCore,
)
from rocm_serve.types import FinishReason
from tests.engine.simulation import make_limits, make_request


class Wire:
    """A link that notes what is sent, and hands over what a test takes for the core's words."""

    def __init__(self) -> None:
        self.sent: list[ToCore] = []

    def listen(self, take: Callable[[FromCore], None], fail: Callable[[str], None]) -> None:
        self.take = take
        take(CoreReady(WIRE_VERSION, make_limits()))

    def send(self, message: ToCore) -> None:
        self.sent.append(message)


def told(story: Callable[[EngineClient, Wire], Coroutine[None, None, None]]) -> None:
    """Tell a story with a client that is ready."""

    async def run() -> None:
        wire = Wire()
        with mock.patch.dict(EngineClient.__init__.__globals__, ClientLink=lambda run_dir: wire):
            client = EngineClient("nowhere")
        await client.start()
        await story(client, wire)

    asyncio.run(run())


async def first_of(
    client: EngineClient, wire: Wire, request: AddRequest, output: Output
) -> Callable[[], Coroutine[None, None, None]]:
    """Ask, have the core answer once, read that; return how to close the iterator."""
    outputs = client.generate(request)
    reading = asyncio.ensure_future(anext(outputs))
    await asyncio.sleep(0)
    wire.take(Outputs((output,), Stats()))
    assert await reading == output
    return outputs.aclose


def test_closing_an_iterator_aborts_what_has_not_ended_and_nothing_else() -> None:
    async def story(client: EngineClient, wire: Wire) -> None:
        request = make_request("a", 5, max_tokens=9)
        for output, aborts in (
            (Output("a", tokens=(1,)), [AbortRequests(("a",))]),
            (Output("a", tokens=(1,), finish_reason=FinishReason.LENGTH), []),
        ):
            wire.sent.clear()
            close = await first_of(client, wire, request, output)
            assert client.num_open == 1
            await close()
            assert wire.sent == [request, *aborts] and client.num_open == 0

    told(story)


def test_the_first_reason_why_the_engine_is_gone_is_kept() -> None:
    async def story(client: EngineClient, wire: Wire) -> None:
        client.fail("killed by signal 9")
        client.fail("the link is closed")
        assert client.state == "dead" and client.error == "killed by signal 9"

    told(story)
