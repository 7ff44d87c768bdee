"""Run the choices of one request on the engine and merge their parts as they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from rocm_serve.messages import Output
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

    async def batches(self, answers: Sequence[Answer]) -> AsyncGenerator[list[Part], None]:
        """Yield the parts of all answers until each has finished, several where they came together.

        Closing it early aborts what still runs. Errors: ApiError when the engine gives up on one; the others are
        aborted.
        """
        if len(answers) == 1:
            async with aclosing(self._one(answers[0])) as batches:
                async for parts in batches:
                    yield parts
            return
        merged: asyncio.Queue[list[Part] | BaseException | None] = asyncio.Queue()
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

    async def _forward(self, answer: Answer, merged: asyncio.Queue[list[Part] | BaseException | None]) -> None:
        try:
            async with aclosing(self._one(answer)) as batches:
                async for parts in batches:
                    merged.put_nowait(parts)
        except Exception as error:  # raised again by the reader of the queue
            merged.put_nowait(error)
        else:
            merged.put_nowait(None)

    async def _one(self, answer: Answer) -> AsyncGenerator[list[Part], None]:
        timer = self._metrics.timer()
        reason = "abort"
        try:
            async with aclosing(self._client.batches(answer.choice.request)) as batches:
                async for outputs in batches:
                    timer.tokens(sum([len(output.tokens) for output in outputs]))
                    parts, error = self._feed(answer, outputs)
                    if parts:
                        yield parts
                    if error is not None:
                        raise error
                    if answer.finish_reason is not None:
                        reason = answer.finish_reason
                        return
            raise ApiError(500, "the engine ended a request without a reason", code="engine_error")
        except ApiError:
            reason = "error"
            raise
        finally:
            timer.finished(reason)

    def _feed(self, answer: Answer, outputs: Sequence[Output]) -> tuple[list[Part], ApiError | None]:
        """Return what these outputs add, and the error that ends it: what came before it is still shown."""
        parts: list[Part] = []
        for output in outputs:
            try:
                part = answer.feed(output)
            except ApiError as error:
                return parts, error
            if part is not None:
                parts.append(part)
            if answer.finish_reason is not None:
                if output.finish_reason is None:
                    self._client.complete(output.request_id)
                break
        return parts, None
