"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from fastapi import APIRouter, Request, Response

from rocm_serve.server.answer import Answer, Part
from rocm_serve.server.body import read_body
from rocm_serve.server.choices import completion_choices
from rocm_serve.server.context import Context
from rocm_serve.server.errors import ApiError
from rocm_serve.server.logprobs import LogprobWriter
from rocm_serve.server.protocol import CompletionRequest
from rocm_serve.server.respond import Frame, checked_choices, chunk_tail, encode, gather_parts, respond, usage
from rocm_serve.server.sse import DONE, event

_KIND = "text_completion"
_TEXT_ONLY = b',"logprobs":null,"finish_reason":null,"stop_reason":null}'


def build_router(context: Context) -> APIRouter:
    """Return the route. Its schema is shown in /docs; the body is read by hand, so that faults name their field."""
    router = APIRouter()
    schema = {"content": {"application/json": {"schema": CompletionRequest.model_json_schema()}}, "required": True}

    @router.post("/v1/completions", openapi_extra={"requestBody": schema})
    async def create_completion(request: Request) -> Response:
        body = await read_body(request, CompletionRequest)
        return await _answer(request, body, context)

    return router


async def _answer(request: Request, body: CompletionRequest, context: Context) -> Response:
    frame = Frame.build("cmpl", body, context)
    num_chars = sum(len(prompt) for prompt in body.prompt if isinstance(prompt, str))
    choices = await checked_choices(
        context, frame, lambda checker, name, rng: completion_choices(body, checker, name, rng), num_chars
    )
    answers = context.runner.answers(choices)
    writer = None
    if body.logprobs is not None:
        writer = LogprobWriter(context.tokenizer, body.logprobs, bool(body.return_tokens_as_token_ids))
    return await respond(
        request,
        context,
        answers,
        stream=(lambda: _stream(answers, frame, context, writer)) if body.stream else None,
        whole=lambda: _whole(answers, frame, context, writer),
    )


async def _whole(
    answers: Sequence[Answer], frame: Frame, context: Context, writer: LogprobWriter | None
) -> dict[str, object]:
    """Gather the parts of every choice and return the whole answer."""
    choices = [_choice(part, writer) for part in await gather_parts(context, answers)]
    return {**frame.fields(_KIND), "choices": choices, "usage": usage(answers, frame)}


def _choice(part: Part, writer: LogprobWriter | None) -> dict[str, object]:
    choice: dict[str, object] = {
        "index": part.index,
        "text": part.text,
        "logprobs": None if writer is None or part.scored is None else writer.lists(part.scored),
        "finish_reason": part.finish_reason,
        "stop_reason": part.stop_reason,
    }
    if part.prompt_logprobs is not None:
        choice["prompt_logprobs"] = part.prompt_logprobs
    return choice


def _encoded(part: Part, writer: LogprobWriter | None) -> bytes:
    """Return `_choice` as JSON: put together by hand where nothing but text varies, as in nearly every chunk."""
    if writer is None and part.finish_reason is None and part.prompt_logprobs is None:
        return b'{"index":%d,"text":%b%b' % (part.index, encode(part.text), _TEXT_ONLY)
    return encode(_choice(part, writer))


async def _stream(
    answers: Sequence[Answer], frame: Frame, context: Context, writer: LogprobWriter | None
) -> AsyncGenerator[bytes, None]:
    """Yield one event per part. With `include_usage` a last one has the counts of all."""
    head = b"data: " + encode(frame.fields(_KIND))[:-1] + b',"choices":['
    try:
        async with aclosing(context.runner.batches(answers)) as batches:
            async for parts in batches:
                tail = chunk_tail(answers, frame)
                yield b"".join([head + _encoded(part, writer) + tail for part in parts])
    except ApiError as error:
        yield event(error.body())
        yield DONE
        return
    if frame.include_usage:
        yield event(encode({**frame.fields(_KIND), "choices": [], "usage": usage(answers, frame)}))
    yield DONE
