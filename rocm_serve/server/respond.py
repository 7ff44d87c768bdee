"""What completions and chat share when they answer: admission, one object or a stream, usage."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TypeVar

import msgspec
from fastapi import Request, Response

from rocm_serve.server.answer import Answer, Part
from rocm_serve.server.choices import Checker, Choice
from rocm_serve.server.context import Context
from rocm_serve.server.logprobs import Scored
from rocm_serve.server.protocol import SamplingFields, StreamOptions
from rocm_serve.server.sse import EventStream, until_disconnect
from rocm_serve.tokens.tokenizer import LONG_TEXT_CHARS

Result = TypeVar("Result")
MakeChoices = Callable[[Checker, str, random.Random], list[Choice]]

encode = msgspec.json.Encoder().encode


@dataclass(frozen=True)
class Frame:
    """What all chunks and the whole answer of one request have in common."""

    id: str
    created: int
    model: str
    num_choices_per_prompt: int
    include_usage: bool
    continuous_usage: bool

    @classmethod
    def build(cls, prefix: str, body: SamplingFields, context: Context) -> Frame:
        options = body.stream_options or StreamOptions()
        return cls(
            id=f"{prefix}-{uuid.uuid4().hex}",
            created=int(datetime.now(UTC).timestamp()),
            model=context.info.served_model_name,
            num_choices_per_prompt=body.n or 1,
            include_usage=bool(options.include_usage),
            continuous_usage=bool(options.continuous_usage_stats),
        )

    def fields(self, kind: str) -> dict[str, object]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def usage(answers: Sequence[Answer], frame: Frame) -> dict[str, int]:
    """Count each prompt once, whatever n is, and every token made, a hidden end token too."""
    prompts = sum(len(answer.choice.request.prompt) for answer in answers[:: frame.num_choices_per_prompt])
    made = sum(answer.num_tokens for answer in answers)
    return {"prompt_tokens": prompts, "completion_tokens": made, "total_tokens": prompts + made}


def chunk_tail(answers: Sequence[Answer], frame: Frame) -> bytes:
    """Return what ends a chunk behind its choices: with `include_usage` usage too, null unless it was asked for."""
    if frame.continuous_usage:
        return b'],"usage":%b}\n\n' % encode(usage(answers, frame))
    return b'],"usage":null}\n\n' if frame.include_usage else b"]}\n\n"


async def gather_parts(context: Context, answers: Sequence[Answer]) -> list[Part]:
    """Run the answers to their ends and return one part each, with everything in it. Errors: ApiError."""
    wholes = [Part(answer.choice.index, "") for answer in answers]
    texts: list[list[str]] = [[] for _ in answers]
    scored: list[list[Scored]] = [[] for _ in answers]
    async with aclosing(context.runner.batches(answers)) as batches:
        async for parts in batches:
            for part in parts:
                whole = wholes[part.index]
                texts[part.index].append(part.text)
                scored[part.index] += part.scored or ()
                whole.prompt_logprobs = part.prompt_logprobs or whole.prompt_logprobs
                whole.finish_reason, whole.stop_reason = part.finish_reason, part.stop_reason
    for whole, text, scores in zip(wholes, texts, scored, strict=True):
        whole.text, whole.scored = "".join(text), scores
    return wholes


async def checked_choices(context: Context, frame: Frame, make: MakeChoices, num_chars: int) -> list[Choice]:
    """Return the choices of a request; a long prompt is tokenised off the event loop. Errors: ApiError."""
    checker = context.checker()
    rng = random.Random(context.rng.getrandbits(64))
    if num_chars > LONG_TEXT_CHARS:
        return await asyncio.to_thread(make, checker, frame.id, rng)
    return make(checker, frame.id, rng)


async def respond(
    request: Request,
    context: Context,
    answers: Sequence[Answer],
    *,
    stream: Callable[[], AsyncGenerator[bytes, None]] | None,
    whole: Callable[[], Coroutine[None, None, object]],
) -> Response:
    """Answer with `stream` if there is one, else with the object that `whole` makes.

    Errors: ApiError 429 or 503 before anything is submitted; those of `whole`.
    """
    with ExitStack() as held:
        held.enter_context(context.gate.admit(len(answers)))
        if stream is not None:
            return EventStream(stream(), on_end=held.pop_all().close)
        body = await _unless_gone(request, whole())
        if body is None:
            return Response(status_code=499)  # nobody reads it
        return Response(encode(body), media_type="application/json")


async def _unless_gone(request: Request, work: Coroutine[None, None, Result]) -> Result | None:
    """Return what `work` makes, or None after cancelling it because the client went away."""
    task = asyncio.create_task(work)
    watch = asyncio.create_task(until_disconnect(request.receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        if not task.done():
            task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)
    return None if task.cancelled() else task.result()
