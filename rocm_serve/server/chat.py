"""POST /v1/chat/completions: the chat template in front of the same answering path. No tools, no reasoning parser."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import msgspec
from fastapi import APIRouter, Request, Response

from rocm_serve.messages import AddRequest
from rocm_serve.server.answer import Answer, Part
from rocm_serve.server.body import read_body
from rocm_serve.server.choices import Checker, Choice, check_fields_together, expand, sampling_params, text_options
from rocm_serve.server.context import Context
from rocm_serve.server.errors import ApiError, bad_request
from rocm_serve.server.logprobs import LogprobWriter, Scored
from rocm_serve.server.messages_text import render_messages
from rocm_serve.server.protocol import ChatRequest
from rocm_serve.server.respond import Frame, checked_choices, encode, gather_parts, respond, usage
from rocm_serve.server.sse import DONE, event

_CHUNK = "chat.completion.chunk"


def build_router(context: Context) -> APIRouter:
    router = APIRouter()
    schema = {"content": {"application/json": {"schema": ChatRequest.model_json_schema()}}, "required": True}

    @router.post("/v1/chat/completions", openapi_extra={"requestBody": schema})
    async def create_chat_completion(request: Request) -> Response:
        body = await read_body(request, ChatRequest)
        return await _answer(request, body, context)

    return router


async def _answer(request: Request, body: ChatRequest, context: Context) -> Response:
    context.checker().check_model(body.model)
    frame = Frame.build("chatcmpl", body, context)
    prompt = render_messages(
        context,
        body.messages,
        add_generation_prompt=True if body.add_generation_prompt is None else body.add_generation_prompt,
        extra=body.chat_template_kwargs or {},
        reasoning_effort=body.reasoning_effort,
    )

    def make(checker: Checker, name: str, rng: random.Random) -> list[Choice]:
        return chat_choices(body, prompt, checker, name, rng)

    answers = context.runner.answers(await checked_choices(context, frame, make, len(prompt)))
    writer = None
    if body.logprobs:
        writer = LogprobWriter(context.tokenizer, body.top_logprobs or 0, bool(body.return_tokens_as_token_ids))
    return await respond(
        request,
        context,
        answers,
        stream=(lambda: _stream(answers, frame, context, writer)) if body.stream else None,
        whole=lambda: _whole(answers, frame, context, writer),
    )


def chat_choices(body: ChatRequest, prompt: str, checker: Checker, request_id: str, rng: random.Random) -> list[Choice]:
    """Return the n choices of a conversation. Errors: ApiError 400."""
    check_fields_together(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs=true", "top_logprobs")
    wanted, name = body.max_tokens, "max_tokens"
    if body.max_completion_tokens is not None:
        if wanted not in (None, body.max_completion_tokens):
            raise bad_request("max_tokens and max_completion_tokens differ; give one of them", "max_tokens")
        wanted, name = body.max_completion_tokens, "max_completion_tokens"
    if wanted == 0:
        raise bad_request("max_tokens must be at least 1 for a chat", "max_tokens")
    ids = checker.prompt_ids(prompt, bool(body.add_special_tokens), "messages")
    top = (body.top_logprobs or 0) if body.logprobs else None
    params = msgspec.structs.replace(sampling_params(body, checker), logprobs=top)
    pattern = Choice(0, AddRequest("", (), params), text_options(body, track_offsets=bool(body.logprobs)), logprobs=top)
    max_tokens = checker.max_tokens(wanted, len(ids), name, "messages")
    checker.check_capacity(1, body.n or 1)
    return expand(pattern, [(ids, max_tokens)], body, request_id, rng)


def _logprobs(scored: Sequence[Scored] | None, writer: LogprobWriter | None) -> dict[str, object] | None:
    if writer is None or scored is None:
        return None
    return {"content": writer.chat_content(scored), "refusal": None}


async def _whole(
    answers: Sequence[Answer], frame: Frame, context: Context, writer: LogprobWriter | None
) -> dict[str, object]:
    choices = [
        {
            "index": part.index,
            "message": {"role": "assistant", "content": part.text, "refusal": None},
            "logprobs": _logprobs(part.scored, writer),
            "finish_reason": part.finish_reason,
            "stop_reason": part.stop_reason,
        }
        for part in await gather_parts(context, answers)
    ]
    return {**frame.fields("chat.completion"), "choices": choices, "usage": usage(answers, frame)}


async def _stream(
    answers: Sequence[Answer], frame: Frame, context: Context, writer: LogprobWriter | None
) -> AsyncGenerator[bytes, None]:
    """Yield the role of each choice, then its text as deltas, as OpenAI does."""
    head = b"data: " + encode(frame.fields(_CHUNK))[:-1] + b',"choices":['
    tail = b'],"usage":null}\n\n' if frame.include_usage else b"]}\n\n"
    try:
        for answer in answers:
            role = Part(answer.choice.index, "")
            yield head + encode(_chunk_choice(role, {"role": "assistant", "content": ""}, writer)) + tail
        async with aclosing(context.runner.parts(answers)) as parts:
            async for part in parts:
                delta: dict[str, object] = {"content": part.text} if part.text else {}
                yield head + encode(_chunk_choice(part, delta, writer)) + tail
    except ApiError as error:
        yield event(error.body())
        yield DONE
        return
    if frame.include_usage:
        yield event(encode({**frame.fields(_CHUNK), "choices": [], "usage": usage(answers, frame)}))
    yield DONE


def _chunk_choice(part: Part, delta: dict[str, object], writer: LogprobWriter | None) -> dict[str, object]:
    return {
        "index": part.index,
        "delta": delta,
        "logprobs": _logprobs(part.scored, writer),
        "finish_reason": part.finish_reason,
        "stop_reason": part.stop_reason,
    }
