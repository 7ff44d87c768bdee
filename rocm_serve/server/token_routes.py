"""POST /tokenize, POST /detokenize, GET /tokenizer_info: the tokenizer over HTTP, as lm-eval's remote backend wants."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

import msgspec
from fastapi import APIRouter, Request, Response

from rocm_serve.server.body import read_body
from rocm_serve.server.context import Context
from rocm_serve.server.errors import ApiError, bad_request
from rocm_serve.server.messages_text import render_messages, usable_text
from rocm_serve.server.protocol import DetokenizeRequest, TokenizeRequest
from rocm_serve.server.tools.request import check_tools
from rocm_serve.tokens.tokenizer import LONG_TEXT_CHARS

MAX_TEXT_MIB = 4  # of one /tokenize: a few seconds of one core

Result = TypeVar("Result")


def json_response(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def build_router(context: Context) -> APIRouter:
    router = APIRouter()
    tokenizer = context.tokenizer

    @router.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        body = await read_body(request, TokenizeRequest)
        checker = context.checker()
        checker.check_model(body.model)
        text = _text_to_tokenize(body, context)

        def answer() -> Response:
            ids = tokenizer.encode(text, body.add_special_tokens)
            strings = [tokenizer.token_string(token) for token in ids] if body.return_token_strs else None
            limit = checker.limits.max_model_len
            return json_response({"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": strings})

        return await _off_loop_if(len(text) > LONG_TEXT_CHARS, answer)

    @router.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        body = await read_body(request, DetokenizeRequest)
        checker = context.checker()
        checker.check_model(body.model)

        def answer() -> Response:
            checker.check_ids(body.tokens, "tokens")
            return json_response({"prompt": tokenizer.decode(body.tokens, body.skip_special_tokens)})

        return await _off_loop_if(len(body.tokens) > LONG_TEXT_CHARS, answer)

    @router.get("/tokenizer_info")
    async def tokenizer_info() -> Response:
        files = tokenizer.files
        return json_response(
            {
                "tokenizer_class": files.tokenizer_class,
                "eos_token": files.eos_token,
                "bos_token": files.bos_token,
                "pad_token": files.pad_token,
                "unk_token": files.unk_token,
                "vocab_size": context.info.vocab_used,
                "model_max_length": files.model_max_length,
                "chat_template": files.chat_template,
            }
        )

    return router


async def _off_loop_if(long: bool, work: Callable[[], Result]) -> Result:
    return await asyncio.to_thread(work) if long else work()


def _text_to_tokenize(body: TokenizeRequest, context: Context) -> str:
    text, param = _text_and_source(body, context)
    if len(text) * 4 > MAX_TEXT_MIB * 2**20 and len(text.encode("utf-8")) > MAX_TEXT_MIB * 2**20:
        message = f"{param}: the text is longer than {MAX_TEXT_MIB} MiB; tokenise it in pieces"
        raise ApiError(413, message, param=param, code="request_too_large")
    return text


def _text_and_source(body: TokenizeRequest, context: Context) -> tuple[str, str]:
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("give either prompt or messages", "prompt", "missing_field")
    if body.prompt is not None and body.tools:
        raise bad_request("tools needs messages", "tools")
    if body.prompt is not None:
        return usable_text(body.prompt, "prompt"), "prompt"
    check_tools(body.tools or [])
    text = render_messages(
        context,
        body.messages or [],
        tools=body.tools or [],
        add_generation_prompt=body.add_generation_prompt,
        extra=body.chat_template_kwargs or {},
    )
    return text, "messages"
