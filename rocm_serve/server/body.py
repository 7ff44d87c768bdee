"""From the bytes of a request to a checked body. Every fault is an ApiError that names the field."""

from __future__ import annotations

import asyncio
import json
from typing import TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from rocm_serve.server.errors import ApiError, bad_request

MAX_BODY_BYTES = 16 * 2**20  # a million token ids take half of it
BODY_S = 60.0  # for all of a body to come
_MOST_NAME = 100  # characters of a field's name in an answer
_BIG_BODY_BYTES = 2**18  # such bodies are parsed on a thread: they would hold up the streams of others

Body = TypeVar("Body", bound=BaseModel)


async def read_body(request: Request, kind: type[Body]) -> Body:
    """Read, parse and validate a JSON body, whatever its Content-Type says.

    Errors: ApiError 413 past MAX_BODY_BYTES, 408 after BODY_S, 400 otherwise.
    """
    try:
        async with asyncio.timeout(BODY_S):
            data = await _read_bytes(request)
    except TimeoutError:
        message = f"the body was not here after {BODY_S:.0f} s"
        raise ApiError(408, message, code="request_timeout", headers={"Connection": "close"}) from None
    if len(data) > _BIG_BODY_BYTES:
        return await asyncio.to_thread(parse_body, data, kind)
    return parse_body(data, kind)


def parse_body(data: bytes, kind: type[Body]) -> Body:
    """Validate a JSON text. NaN and infinity are parsed, so that the field that holds them can be named."""
    try:
        value = json.loads(data)
    except UnicodeDecodeError:
        raise bad_request("the body is not UTF-8", None, "invalid_json") from None
    except ValueError as error:
        raise bad_request(f"the body is not valid JSON: {error}", None, "invalid_json") from None
    except RecursionError:
        raise bad_request("the body is nested too deeply", None, "invalid_json") from None
    if not isinstance(value, dict):
        raise bad_request("the body must be a JSON object", None, "invalid_json")
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise _field_error(error) from None


async def _read_bytes(request: Request) -> bytes:
    declared = request.headers.get("content-length", "0")
    if declared.isdecimal() and int(declared) > MAX_BODY_BYTES:
        raise _too_large()
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise _too_large()
        parts.append(part)
    return b"".join(parts)


def _too_large() -> ApiError:
    return ApiError(413, f"the body is larger than {MAX_BODY_BYTES} bytes", code="request_too_large")


def _field_error(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    path = [part for part in first["loc"] if isinstance(part, str)]
    param = ".".join(path)[:_MOST_NAME] or None
    if first["type"] == "extra_forbidden":
        return bad_request(f"unknown field {param!r}: it would have no effect here", param, "unknown_field")
    if first["type"] == "missing":
        return bad_request(f"{param} is required", param, "missing_field")
    text = first["msg"]
    return bad_request(text if first["type"] == "invalid_value" else f"{param}: {text}", param)
