"""POST /v1/chat/completions: the chat template in front of the same answering path, the parsers behind it."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing

import msgspec
from fastapi import APIRouter, Request, Response

from rocm_serve.messages import AddRequest
from rocm_serve.server.answer import Answer, Part
from rocm_serve.server.body import read_body
from rocm_serve.server.chat_message import MakeMessageParser, MessageParser, delta, message
from rocm_serve.server.choices import Checker, Choice, check_fields_together, expand, sampling_params, text_options
from rocm_serve.server.context import Context
from rocm_serve.server.errors import ApiError, bad_request
from rocm_serve.server.logprobs import LogprobWriter, Scored
from rocm_serve.server.messages_text import render_messages
from rocm_serve.server.pieces import Piece, joined
from rocm_serve.server.protocol import ChatRequest
from rocm_serve.server.reasoning import REASONING_PARSERS
from rocm_serve.server.respond import Frame, checked_choices, chunk_tail, encode, gather_parts, respond, usage
from rocm_serve.server.sse import DONE, event
from rocm_serve.server.tools import TOOL_PARSERS
from rocm_serve.server.tools.request import Tools, tools_shown

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
    tools = tools_shown(body, context.info.tool_call_parser, tuple(TOOL_PARSERS))
    prompt = render_messages(
        context,
        body.messages,
        tools=tools,
        add_generation_prompt=True if body.add_generation_prompt is None else body.add_generation_prompt,
        extra=body.chat_template_kwargs or {},
        reasoning_effort=body.reasoning_effort,
    )

    parser = message_parser(body, prompt, tools, context)

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
        stream=(lambda: _stream(answers, frame, context, writer, parser)) if body.stream else None,
        whole=lambda: _whole(answers, frame, context, writer, parser),
    )


def message_parser(body: ChatRequest, prompt: str, tools: Tools, context: Context) -> MakeMessageParser:
    """Return what makes a parser for each choice. Errors: ApiError 400 that names the field."""
    reasoning, calls = context.info.reasoning_parser, context.info.tool_call_parser
    if body.separate_reasoning and reasoning is None:
        flags = " or ".join(f"--reasoning-parser {name}" for name in REASONING_PARSERS)
        raise bad_request(f"this server does not separate reasoning: start it with {flags}", "separate_reasoning")

    def make() -> MessageParser:
        return MessageParser(
            REASONING_PARSERS[reasoning](prompt, calls_end_it=bool(tools))
            if reasoning is not None and body.separate_reasoning is not False
            else None,
            TOOL_PARSERS[calls](tools, parallel=body.parallel_tool_calls is not False)
            if calls is not None and tools
            else None,
        )

    return make


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


def _read(part: Part, parser: MessageParser, context: Context) -> list[Piece]:
    """Parse the text of a part; the last part of an answer also gets the finish reason to show."""
    pieces = parser.feed(part.text)
    if part.finish_reason is None:
        return pieces
    stopped = part.stop_reason is not None and part.stop_reason not in context.info.eos_token_ids
    pieces = joined([*pieces, *parser.finish(cut=stopped or part.finish_reason != "stop")])
    part.finish_reason = parser.finish_reason(part.finish_reason)
    return pieces


async def _whole(
    answers: Sequence[Answer],
    frame: Frame,
    context: Context,
    writer: LogprobWriter | None,
    make_parser: MakeMessageParser,
) -> dict[str, object]:
    choices: list[dict[str, object]] = []
    for part in await gather_parts(context, answers):
        parser = make_parser()
        said = message(_read(part, parser, context), has_reasoning=parser.has_reasoning)
        choices.append(
            {
                "index": part.index,
                "message": said,
                "logprobs": _logprobs(part.scored, writer),
                "finish_reason": part.finish_reason,
                "stop_reason": part.stop_reason,
            }
        )
    return {**frame.fields("chat.completion"), "choices": choices, "usage": usage(answers, frame)}


async def _stream(
    answers: Sequence[Answer],
    frame: Frame,
    context: Context,
    writer: LogprobWriter | None,
    make_parser: MakeMessageParser,
) -> AsyncGenerator[bytes, None]:
    """Yield the role of each choice, then what it says as deltas, as OpenAI does."""
    parsers = [make_parser() for _ in answers]
    head = b"data: " + encode(frame.fields(_CHUNK))[:-1] + b',"choices":['
    tail = chunk_tail(answers, frame)
    try:
        for answer in answers:
            role: dict[str, object] = {"role": "assistant", "content": ""}
            yield head + encode(_chunk_choice(Part(answer.choice.index, ""), role, writer)) + tail
        async with aclosing(context.runner.batches(answers)) as batches:
            async for parts in batches:
                tail = chunk_tail(answers, frame)
                events: list[bytes] = []
                for part in parts:
                    pieces = _read(part, parsers[part.index], context)
                    events += [head + encode(choice) + tail for choice in _chunk_choices(part, pieces, writer)]
                if events:
                    yield b"".join(events)
    except ApiError as error:
        yield event(error.body())
        yield DONE
        return
    if frame.include_usage:
        yield event(encode({**frame.fields(_CHUNK), "choices": [], "usage": usage(answers, frame)}))
    yield DONE


def _chunk_choices(part: Part, pieces: Sequence[Piece], writer: LogprobWriter | None) -> Iterator[dict[str, object]]:
    """Yield a chunk per piece: the log-probs of the part go with the first, its end with the last."""
    if not pieces and (part.scored is not None or part.finish_reason is not None):
        yield _chunk_choice(part, {}, writer)
    for place, piece in enumerate(pieces):
        own = Part(part.index, "", part.scored if place == 0 else None)
        if place == len(pieces) - 1:
            own.finish_reason, own.stop_reason = part.finish_reason, part.stop_reason
        yield _chunk_choice(own, delta(piece), writer)


def _chunk_choice(part: Part, said: dict[str, object], writer: LogprobWriter | None) -> dict[str, object]:
    return {
        "index": part.index,
        "delta": said,
        "logprobs": _logprobs(part.scored, writer),
        "finish_reason": part.finish_reason,
        "stop_reason": part.stop_reason,
    }
