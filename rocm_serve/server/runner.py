"""Run the choices of one request on the engine and merge their parts as they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from rocm_serve.server.answer import Answer, Part
from rocm_serve.server.choices import Choice
from rocm_serve.server.errors import ApiError
from rocm_serve.server.info import EngineClientProtocol
from rocm_serve.server.metrics import Metrics
from rocm_serve.tokens.tokenizer import Tokenizer


class Runner:
    """Everything a request needs once it has been checked."""

    def __init__(self, client: EngineClientProtocol, tokenizer: Tokenizer, metrics: Metrics) -> None:
        self._client = client
        self._tokenizer = tokenizer
        self._metrics = metrics

    def answers(self, choices: Sequence[Choice]) -> list[Answer]:
        return [Answer(choice, self._tokenizer) for choice in choices]

    async def parts(self, answers: Sequence[Answer]) -> AsyncGenerator[Part, None]:
        """Yield the parts of all answers until each has finished. Closing it early aborts what still runs.

        Errors: ApiError when the engine gives up on one; the others are aborted.
        """
        if len(answers) == 1:
            async with aclosing(self._one(answers[0])) as parts:
                async for part in parts:
                    yield part
            return
        merged: asyncio.Queue[Part | BaseException | None] = asyncio.Queue()
        tasks = [asyncio.create_task(self._forward(answer, merged)) for answer in answers]
        try:
            open_answers = len(tasks)
            while open_answers:
                item = await merged.get()
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    open_answers -= 1
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _forward(self, answer: Answer, merged: asyncio.Queue[Part | BaseException | None]) -> None:
        try:
            async with aclosing(self._one(answer)) as parts:
                async for part in parts:
                    merged.put_nowait(part)
        except Exception as error:  # raised again by the reader of the queue
            merged.put_nowait(error)
        else:
            merged.put_nowait(None)

    async def _one(self, answer: Answer) -> AsyncGenerator[Part, None]:
        timer = self._metrics.timer()
        reason = "abort"
        try:
            async with aclosing(self._client.generate(answer.choice.request)) as outputs:
                async for output in outputs:
                    if output.tokens:
                        timer.tokens(len(output.tokens))
                    part = answer.feed(output)
                    if answer.finish_reason is not None and output.finish_reason is None:
                        self._client.complete(output.request_id)
                    if part is not None:
                        yield part
                    if answer.finish_reason is not None:
                        reason = answer.finish_reason
                        return
            raise ApiError(500, "the engine ended a request without a reason", code="engine_error")
        except ApiError:
            reason = "error"
            raise
        finally:
            timer.finished(reason)
