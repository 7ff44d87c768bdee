"""POST /tokenize, POST /detokenize, GET /tokenizer_info: the tokenizer over HTTP, as lm-eval's remote backend wants."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request, Response

from rocm_serve.server.body import read_body
from rocm_serve.server.context import Context
from rocm_serve.server.errors import bad_request
from rocm_serve.server.messages_text import render_messages, usable_text
from rocm_serve.server.protocol import DetokenizeRequest, TokenizeRequest


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
        ids = tokenizer.encode(_text_to_tokenize(body, context), body.add_special_tokens)
        answer = {"count": len(ids), "max_model_len": context.client.limits.max_model_len, "tokens": ids}
        if body.return_token_strs:
            return json_response({**answer, "token_strs": [tokenizer.token_string(token) for token in ids]})
        return json_response({**answer, "token_strs": None})

    @router.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        body = await read_body(request, DetokenizeRequest)
        checker = context.checker()
        checker.check_model(body.model)
        checker.check_ids(body.tokens, "tokens")
        return json_response({"prompt": tokenizer.decode(body.tokens, body.skip_special_tokens)})

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


def _text_to_tokenize(body: TokenizeRequest, context: Context) -> str:
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("give either prompt or messages", "prompt", "missing_field")
    if body.prompt is not None:
        return usable_text(body.prompt, "prompt")
    return render_messages(
        context,
        body.messages or [],
        add_generation_prompt=body.add_generation_prompt,
        extra=body.chat_template_kwargs or {},
    )
