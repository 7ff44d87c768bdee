"""POST /v1/completions."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass
from datetime import UTC, datetime

import msgspec
from fastapi import APIRouter, Request, Response

from rocm_serve.server.answer import Answer, Part, PromptLogprobs
from rocm_serve.server.body import read_body
from rocm_serve.server.choices import completion_choices
from rocm_serve.server.context import Context
from rocm_serve.server.errors import ApiError
from rocm_serve.server.logprobs import LogprobLists
from rocm_serve.server.protocol import CompletionRequest
from rocm_serve.server.sse import DONE, EventStream, event, until_disconnect

_encode = msgspec.json.Encoder().encode
_LONG_PROMPT_CHARS = 20_000  # such prompts are tokenised on a thread: they would hold up the streams of others


def build_router(context: Context) -> APIRouter:
    """Return the route. Its schema is shown in /docs; the body is read by hand, so that faults name their field."""
    router = APIRouter()
    schema = {"content": {"application/json": {"schema": CompletionRequest.model_json_schema()}}, "required": True}

    @router.post("/v1/completions", openapi_extra={"requestBody": schema})
    async def create_completion(request: Request) -> Response:
        body = await read_body(request, CompletionRequest)
        return await _answer(request, body, context)

    return router


@dataclass(frozen=True)
class _Frame:
    """What all chunks and the whole answer of one request have in common."""

    id: str
    created: int
    model: str
    num_choices_per_prompt: int

    def fields(self) -> dict[str, object]:
        return {"id": self.id, "object": "text_completion", "created": self.created, "model": self.model}


async def _answer(request: Request, body: CompletionRequest, context: Context) -> Response:
    frame = _Frame(
        id=f"cmpl-{uuid.uuid4().hex}",
        created=int(datetime.now(UTC).timestamp()),
        model=context.info.served_model_name,
        num_choices_per_prompt=body.n or 1,
    )
    checker = context.checker()
    rng = random.Random(context.rng.getrandbits(64))
    if sum(len(prompt) for prompt in body.prompt if isinstance(prompt, str)) > _LONG_PROMPT_CHARS:
        choices = await asyncio.to_thread(completion_choices, body, checker, frame.id, rng)
    else:
        choices = completion_choices(body, checker, frame.id, rng)
    answers = context.runner.answers(choices)
    with ExitStack() as held:
        held.enter_context(context.gate.admit(len(choices)))
        if body.stream:
            usage = body.stream_options is not None and bool(body.stream_options.include_usage)
            return EventStream(_stream(answers, frame, context, usage), on_end=held.pop_all().close)
        return await _whole(request, answers, frame, context)


async def _whole(request: Request, answers: list[Answer], frame: _Frame, context: Context) -> Response:
    """Answer in one JSON object. A client that goes away ends the work."""
    work = asyncio.create_task(_collect(answers, context))
    watch = asyncio.create_task(until_disconnect(request.receive))
    try:
        await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        if not work.done():
            work.cancel()
        watch.cancel()
        await asyncio.gather(work, watch, return_exceptions=True)
    if work.cancelled():
        return Response(status_code=499)  # nobody reads it
    body = {**frame.fields(), "choices": work.result(), "usage": _usage(answers, frame)}
    return Response(_encode(body), media_type="application/json")


async def _collect(answers: Sequence[Answer], context: Context) -> list[dict[str, object]]:
    texts: list[list[str]] = [[] for _ in answers]
    logprobs: list[LogprobLists | None] = [None] * len(answers)
    prompt_logprobs: list[PromptLogprobs | None] = [None] * len(answers)
    last: list[Part | None] = [None] * len(answers)
    async with aclosing(context.runner.parts(answers)) as parts:
        async for part in parts:
            texts[part.index].append(part.text)
            known = logprobs[part.index]
            if known is None:
                logprobs[part.index] = part.logprobs
            elif part.logprobs is not None:
                known.extend(part.logprobs)
            if part.prompt_logprobs is not None:
                prompt_logprobs[part.index] = part.prompt_logprobs
            last[part.index] = part
    for answer, lists in zip(answers, logprobs, strict=True):
        if lists is None and answer.choice.logprobs is not None:
            logprobs[answer.choice.index] = LogprobLists()
    return [
        _choice(Part(index, "".join(texts[index]), lists, end.finish_reason, end.stop_reason, prompts))
        for index, (lists, prompts, end) in enumerate(zip(logprobs, prompt_logprobs, last, strict=True))
        if end is not None
    ]


def _choice(part: Part) -> dict[str, object]:
    choice: dict[str, object] = {
        "index": part.index,
        "text": part.text,
        "logprobs": None if part.logprobs is None else part.logprobs.as_dict(),
        "finish_reason": part.finish_reason,
        "stop_reason": part.stop_reason,
    }
    if part.prompt_logprobs is not None:
        choice["prompt_logprobs"] = part.prompt_logprobs
    return choice


def _usage(answers: Sequence[Answer], frame: _Frame) -> dict[str, int]:
    """Count each prompt once, whatever n is, and every token made, a hidden end token too."""
    prompts = sum(len(answer.choice.request.prompt) for answer in answers[:: frame.num_choices_per_prompt])
    made = sum(answer.num_tokens for answer in answers)
    return {"prompt_tokens": prompts, "completion_tokens": made, "total_tokens": prompts + made}


async def _stream(
    answers: Sequence[Answer], frame: _Frame, context: Context, include_usage: bool
) -> AsyncGenerator[bytes, None]:
    """Yield one event per part. With `include_usage` every chunk has usage null, and a last one the counts."""
    head = b"data: " + _encode(frame.fields())[:-1] + b',"choices":['
    tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
    try:
        async with aclosing(context.runner.parts(answers)) as parts:
            async for part in parts:
                yield head + _encode(_choice(part)) + tail
    except ApiError as error:
        yield event(error.body())
        yield DONE
        return
    if include_usage:
        yield event(_encode({**frame.fields(), "choices": [], "usage": _usage(answers, frame)}))
    yield DONE
