"""Every error of the HTTP surface in OpenAI's shape: {"error": {message, type, param, code}}."""

from __future__ import annotations

import json
from collections.abc import Mapping

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

_MAX_CHARS = 350  # of what an error says of the request; our own sentences are shorter
_CODES = {404: "not_found", 405: "method_not_allowed"}


def _cut(text: str) -> str:
    """Keep both ends of a text that quotes a long input."""
    if len(text) <= _MAX_CHARS:
        return text
    return f"{text[:200]} [... {len(text) - 300} characters ...] {text[-100:]}"


class ApiError(Exception):
    """An answer other than 200. `param` names the request field that was wrong, if one was."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message if status >= 500 else _cut(message)
        self.param = None if param is None else _cut(param)
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> bytes:
        """Return the JSON object. ASCII only: a message may quote a lone surrogate that the client sent."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return json.dumps({"error": error}).encode("ascii")

    @property
    def kind(self) -> str:
        if self.status == 429:
            return "rate_limit_error"
        if self.status == 503:
            return "service_unavailable"
        return "server_error" if self.status >= 500 else "invalid_request_error"


def bad_request(message: str, param: str | None, code: str | None = "invalid_value") -> ApiError:
    """Return the 400 that names a field."""
    return ApiError(400, message, param=param, code=code)


def answered(request: Request, error: ApiError) -> Response:
    """Return the answer to `request`, and count it."""
    request.app.state.context.metrics.error(request.url.path, error.status)
    return error_response(error)


def error_response(error: ApiError) -> Response:
    return Response(error.body(), error.status, error.headers, media_type="application/json")


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return answered(request, error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    return answered(
        request, ApiError(error.status_code, message, code=_CODES.get(error.status_code), headers=error.headers)
    )


async def _on_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    names = [str(part) for part in first["loc"] if part not in ("body", "query", "path")]
    return answered(request, bad_request(str(first["msg"]), ".".join(names) or None))


async def _on_client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


async def _on_crash(request: Request, error: Exception) -> Response:
    return answered(request, ApiError(500, f"internal error: {type(error).__name__}", code="internal_error"))


def install_error_handlers(app: FastAPI) -> None:
    """Give every failure of `app` the one shape, those of FastAPI and Starlette too."""
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(ClientDisconnect, _on_client_gone)
    app.add_exception_handler(Exception, _on_crash)
