"""Short ways to ask an app in this process, and to read a stream."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx

from rocm_serve.server.app import create_app
from rocm_serve.server.info import ServerInfo
from rocm_serve.tokens.tokenizer import Tokenizer
from tests.server.fake_engine import FakeEngine
from tests.tokens.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
VOCAB = TOKENIZER.vocab_used
EOS = tuple(TOKENIZER.encode("<|im_end|><|endoftext|>"))
Json = dict[str, Any]


def make_info(**changes: Any) -> ServerInfo:
    values: Json = {
        "served_model_name": "tiny",
        "model": "models/tiny",
        "vocab_used": VOCAB,
        "eos_token_ids": EOS,
        "max_running_requests": 4,
        **changes,
    }
    return ServerInfo(**values)


def with_client(
    talk: Callable[[httpx.AsyncClient, FakeEngine], Awaitable[None]],
    info: ServerInfo | None = None,
    tokenizer: Tokenizer = TOKENIZER,
    **engine: Any,
) -> None:
    """Run `talk` against a fresh app. An exception inside the app is raised here."""

    async def main() -> None:
        fake = FakeEngine(VOCAB, **engine)
        transport = httpx.ASGITransport(create_app(fake, tokenizer, info or make_info()))
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client:
            await talk(client, fake)
        assert not fake.running

    asyncio.run(main())


async def complete(client: httpx.AsyncClient, **body: Any) -> Json:
    """POST /v1/completions; the answer must be 200."""
    response = await client.post("/v1/completions", json={"model": "tiny", **body})
    assert response.status_code == 200, response.text
    answer: Json = response.json()
    return answer


async def events(client: httpx.AsyncClient, **body: Any) -> list[Json]:
    """The chunks of a stream, which must end with [DONE]."""
    response = await client.post("/v1/completions", json={"model": "tiny", "stream": True, **body})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines) and lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def joined(chunks: list[Json]) -> list[Json]:
    """Put the choices of a stream together, as the whole answer has them."""
    choices: dict[int, Json] = {}
    for chunk in chunks:
        for part in chunk["choices"]:
            known = choices.setdefault(part["index"], {"index": part["index"], "text": "", "logprobs": None})
            known["text"] += part["text"]
            if part["logprobs"] is not None:
                lists = known["logprobs"] or {name: [] for name in part["logprobs"]}
                known["logprobs"] = {name: lists[name] + part["logprobs"][name] for name in lists}
            if "prompt_logprobs" in part:
                known["prompt_logprobs"] = part["prompt_logprobs"]
            assert "finish_reason" not in known, "nothing comes after the finish reason"
            if part["finish_reason"] is not None:
                known |= {name: part[name] for name in ("finish_reason", "stop_reason")}
    return [choices[index] for index in sorted(choices)]


async def both_modes(client: httpx.AsyncClient, **body: Any) -> list[Json]:
    """Ask whole and streamed, check that the choices are equal, and return them."""
    whole = (await complete(client, **body))["choices"]
    streamed = joined(await events(client, **body))
    assert streamed == whole
    choices: list[Json] = whole
    return choices


async def refused(client: httpx.AsyncClient, status: int, path: str = "/v1/completions", **body: Any) -> Json:
    """Ask whole and streamed; both must fail alike, in the nested shape. Returns the error object."""
    errors = []
    modes: list[Json] = [{}, {"stream": True}] if path == "/v1/completions" else [{}]
    for mode in modes:
        content = json.dumps({**body, **mode})
        response = await client.post(path, content=content)
        assert response.status_code == status, (response.status_code, response.text)
        errors.append(error_of(response))
    assert all(error == errors[0] for error in errors)
    return errors[0]


def error_of(response: httpx.Response) -> Json:
    body = response.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    error: Json = body["error"]
    assert isinstance(error["message"], str) and error["message"] and isinstance(error["type"], str)
    return error
