"""Ask a served model whole and streamed, many requests at once, and check that refusals have one shape."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from tests.e2e.harness import Server
from tests.server.http import Json, error_of, joined

PATH = "/v1/completions"


def events(server: Server, **body: object) -> list[Json]:
    """Return the chunks of a stream, which must end with [DONE]."""
    with server.client() as client:
        response = client.post(PATH, json={"model": server.name, "stream": True} | body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines) and lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def whole(server: Server, **body: object) -> list[Json]:
    choices: list[Json] = server.complete(**body)["choices"]
    return choices


def streamed(server: Server, **body: object) -> list[Json]:
    return joined(events(server, **body))


def both_modes(server: Server, **body: object) -> list[Json]:
    """Ask whole and streamed at once, check that the choices are equal, and return them."""
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(streamed, server, **body)
        choices = whole(server, **body)
    assert other.result() == choices
    return choices


def all_at_once(server: Server, bodies: Sequence[Mapping[str, Any]]) -> list[Future[Json]]:
    """Send every request before the first answer is waited for; the futures come in the order of `bodies`."""
    with ThreadPoolExecutor(max(1, len(bodies))) as pool:
        return [pool.submit(server.complete, **body) for body in bodies]


def refused(server: Server, status: int, **body: object) -> Json:
    """Ask whole and streamed; both must fail alike, in the nested shape. Returns the error object."""
    errors = []
    modes: list[dict[str, object]] = [{}] if "stream" in body else [{}, {"stream": True}]
    with server.client() as client:
        for mode in modes:
            content = json.dumps({"model": server.name} | body | mode)  # writes NaN, which httpx would not
            response = client.post(PATH, content=content)
            assert response.status_code == status, f"{content[:200]}: {response.status_code} {response.text}"
            errors.append(error_of(response))
    assert all(error == errors[0] for error in errors)
    return errors[0]
