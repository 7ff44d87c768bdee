"""Every bad body: the right status, the nested error, the field named; the engine never hears of it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rocm_serve.server.app import create_app
from rocm_serve.server.body import MAX_BODY_BYTES
from rocm_serve.server.protocol import CompletionRequest
from tests.server.fake_engine import FakeEngine
from tests.server.http import TOKENIZER, VOCAB, complete, error_of, make_info, refused, with_client

NAN = float("nan")
BAD_FIELDS: list[tuple[str, Any]] = [
    ("best_of", 2),
    ("best_of", "1"),
    ("echo", "yes"),
    ("frequency_penalty", 2.01),
    ("frequency_penalty", NAN),
    ("ignore_eos", 1),
    ("logit_bias", {str(VOCAB): 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"AI": 1}),
    ("logit_bias", {"5": 1e30}),
    ("logit_bias", {"5": NAN}),
    ("logit_bias", {"5": -100.1}),
    ("logit_bias", {"5": None}),
    ("logit_bias", {"5": True}),
    ("logit_bias", {"٥": 1}),
    ("logit_bias", {"\ud800": 1}),
    ("logit_bias", [1]),
    ("logprobs", 21),
    ("logprobs", -1),
    ("logprobs", True),
    ("max_tokens", -1),
    ("max_tokens", 1.5),
    ("max_tokens", "5"),
    ("max_tokens", 0),
    ("min_p", 1.1),
    ("min_tokens", 17),
    ("min_tokens", -1),
    ("n", 0),
    ("n", 129),
    ("presence_penalty", -3),
    ("prompt_logprobs", 21),
    ("repetition_penalty", 0),
    ("repetition_penalty", 1e9),
    ("seed", 2**64),
    ("seed", 0.5),
    ("skip_special_tokens", "no"),
    ("stop", ""),
    ("stop", [""]),
    ("stop", ["a", None]),
    ("stop", 5),
    ("stop", ["x"] * 65),
    ("stop", "x" * 1025),
    ("stop", "\ud800"),
    ("stop_token_ids", [None]),
    ("stop_token_ids", [10**9]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [True]),
    ("stop_token_ids", 5),
    ("stream", "yes"),
    ("suffix", "x"),
    ("suffix", ""),
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("temperature", NAN),
    ("temperature", float("inf")),
    ("temperature", 10**400),
    ("top_k", -2),
    ("top_k", 2**31),
    ("top_p", -0.1),
    ("top_p", 1.1),
    ("user", 5),
    ("guided_json", {}),
    ("max_gen_toks", 5),
    ("n ", 1),
]
BAD_PROMPTS: list[Any] = [
    "",
    [],
    [""],
    [[]],
    ["a", ""],
    [[1], []],
    None,
    5,
    {"a": 1},
    "\u0000",
    "a\u0000b",
    "\ud83d",
    ["ok", "\udc00"],
    [1, 2, VOCAB],
    [[1], [-1]],
    [10**30],
    [1.0],
    [True],
    [None],
    [[None]],
    [["a"]],
    [1, "a"],
    ["a", 1],
    [[1], 2],
]


def test_end_tokens_that_leave_nothing_to_make_are_refused() -> None:
    """They are masked until min_tokens are out; a row with every id masked would end the engine for all."""

    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        body = {"prompt": "x", "max_tokens": 2, "stop_token_ids": list(range(VOCAB))}
        refused = await client.post("/v1/completions", json=body | {"min_tokens": 1})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "stop_token_ids"
        assert (await client.post("/v1/completions", json=body)).status_code == 200

    with_client(talk)


@pytest.mark.parametrize(("name", "value"), BAD_FIELDS, ids=lambda value: ascii(value)[:30])
def test_a_bad_field_is_a_400_that_names_it(name: str, value: Any) -> None:
    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        body = {"prompt": "a", name: value}
        if name == "stream":
            response = await client.post("/v1/completions", json=body)
            assert response.status_code == 400
            error = error_of(response)
        else:
            error = await refused(client, 400, **body)
        assert error["param"] == name and error["type"] == "invalid_request_error"
        assert not engine.seen
        await complete(client, prompt="a", max_tokens=1)

    with_client(talk)


@pytest.mark.parametrize("prompt", BAD_PROMPTS, ids=lambda value: ascii(value)[:30])
def test_a_bad_prompt_is_a_400_that_names_it(prompt: Any) -> None:
    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        assert (await refused(client, 400, prompt=prompt))["param"] == "prompt"
        assert not engine.seen
        await complete(client, prompt="a", max_tokens=1)

    with_client(talk)


def test_a_missing_prompt_and_misplaced_stream_options_are_named() -> None:
    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        assert (await refused(client, 400, model="tiny"))["param"] == "prompt"
        for body, param in [
            ({"stream_options": {"include_usage": True}}, "stream_options"),
            ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
            ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
            ({"stream": True, "stream_options": {"other": 1}}, "stream_options.other"),
            (
                {"stream": True, "stream_options": {"continuous_usage_stats": True}},
                "stream_options.continuous_usage_stats",
            ),
            ({"stream": True, "stream_options": 5}, "stream_options"),
        ]:
            response = await client.post("/v1/completions", json={"prompt": "a", **body})
            assert response.status_code == 400 and error_of(response)["param"] == param

    with_client(talk)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": [[1] * 40], "max_tokens": 1}, "prompt"),
        ({"prompt": [[1] * 41]}, "prompt"),
        ({"prompt": [[1] * 41], "max_tokens": None}, "prompt"),
        ({"prompt": "a " * 60}, "prompt"),
        ({"prompt": [[1] * 41], "max_tokens": 0, "echo": True}, "prompt"),
        ({"prompt": [[1] * 30], "max_tokens": 11}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 10**12}, "max_tokens"),
        ({"prompt": ["a", [1] * 41]}, "prompt"),
    ],
)
def test_more_than_the_context_is_refused_and_never_cut(body: dict[str, Any], param: str) -> None:
    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        error = await refused(client, 400, **body)
        assert (error["code"], error["param"]) == ("context_length_exceeded", param)
        assert not engine.seen

    with_client(talk, max_model_len=40)


def test_exactly_the_context_is_served() -> None:
    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        answer = await complete(client, prompt=[[1] * 30], max_tokens=10, ignore_eos=True)
        assert answer["usage"]["total_tokens"] == 40
        scored = await complete(client, prompt=[[1] * 40], max_tokens=0, echo=True, logprobs=0)
        assert len(scored["choices"][0]["logprobs"]["tokens"]) == 40 and scored["usage"]["total_tokens"] == 40

    with_client(talk, max_model_len=40)


def test_a_huge_unknown_field_is_named_in_short() -> None:
    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        error = await refused(client, 400, prompt="a", **{"x" * 100_000: 1})
        assert error["code"] == "unknown_field" and error["param"] == "x" * 100 and len(error["message"]) < 200

    with_client(talk)


@pytest.mark.parametrize(
    ("name", "nothing", "something"),
    [
        ("prediction", [None], {"type": "content"}),
        ("service_tier", [None, "auto", "default"], "flex"),
        ("modalities", [None, ["text"]], ["text", "audio"]),
        ("store", [None, False], True),
        ("metadata", [None, {}], {"a": "b"}),
        ("verbosity", [None], "low"),
    ],
)
def test_a_field_that_is_not_there_is_taken_when_it_asks_for_nothing(
    name: str, nothing: list[Any], something: Any
) -> None:
    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        for value in nothing:
            await complete(client, prompt="a", max_tokens=1, **{name: value})
        error = await refused(client, 400, prompt="a", **{name: something})
        assert (error["param"], error["code"]) == (name, "unknown_field")

    with_client(talk)


def test_min_tokens_beyond_what_is_left_is_refused() -> None:
    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        assert (await refused(client, 400, prompt=[[1] * 38], min_tokens=3))["param"] == "min_tokens"

    with_client(talk, max_model_len=40)


def test_an_unknown_model_is_a_404_and_no_model_is_the_served_one() -> None:
    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        for name in ("other", "", "\ud800"):
            error = await refused(client, 404, model=name, prompt="a")
            assert (error["code"], error["param"]) == ("model_not_found", "model")
        response = await client.post("/v1/completions", content='{"prompt": "a", "\\ud800": 1}')
        assert response.status_code == 400 and error_of(response)["type"] == "invalid_request_error"
        response = await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1})
        assert response.status_code == 200 and response.json()["model"] == "tiny"

    with_client(talk)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"a"',
        b"\xff",
        b'{"prompt": "a"} x',
        b"[" * 100_000,
        b'{"seed": ' + b"9" * 5000 + b"}",
    ],
)
def test_a_body_that_is_not_a_json_object_is_a_400(content: bytes) -> None:
    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        for path in ("/v1/completions", "/tokenize", "/detokenize"):
            response = await client.post(path, content=content)
            assert response.status_code == 400
            assert error_of(response)["code"] == "invalid_json"
        assert not engine.seen

    with_client(talk)


def test_a_body_past_the_limit_is_a_413_declared_or_not() -> None:
    async def drip() -> Any:
        for _ in range(MAX_BODY_BYTES // 2**20 + 1):
            yield b" " * 2**20

    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        headers = {"Content-Length": str(MAX_BODY_BYTES + 1)}
        response = await client.post("/v1/completions", content=b"{}", headers=headers)
        assert response.status_code == 413 and error_of(response)["code"] == "request_too_large"
        response = await client.post("/v1/completions", content=drip())
        assert response.status_code == 413

    with_client(talk)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_a_client_that_goes_away_while_its_body_is_read_is_no_fault(path: str) -> None:
    incoming = iter([{"type": "http.request", "body": b'{"pro', "more_body": True}, {"type": "http.disconnect"}])
    sent: list[Any] = []

    async def receive() -> Any:
        return next(incoming)

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""}
    app = create_app(FakeEngine(VOCAB), TOKENIZER, make_info())
    asyncio.run(app({**scope, "headers": [], "http_version": "1.1", "scheme": "http"}, receive, send))
    assert sent[0]["status"] == 499


def test_any_content_type_and_any_authorization_are_taken() -> None:
    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        content = json.dumps({"prompt": "a", "max_tokens": 1})
        for headers in (
            {"Content-Type": "application/x-www-form-urlencoded"},
            {"Authorization": "Bearer "},
            {"Authorization": "Bearer sk-nonsense"},
        ):
            response = await client.post("/v1/completions", content=content, headers=headers)
            assert response.status_code == 200

    with_client(talk)


def test_unknown_paths_and_methods_have_the_nested_shape() -> None:
    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        response = await client.get("/v1/nothing")
        assert response.status_code == 404 and error_of(response)["code"] == "not_found"
        for method, path in (("GET", "/v1/completions"), ("POST", "/v1/models"), ("DELETE", "/health")):
            response = await client.request(method, path)
            assert response.status_code == 405 and error_of(response)["code"] == "method_not_allowed"
            assert response.headers["allow"]

    with_client(talk)


def test_a_path_with_a_slash_too_many_is_a_404() -> None:
    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        for path in ("/v1/completions/", "/v1/chat/completions/", "/tokenize/"):
            response = await client.post(path, json={"prompt": "a"})
            assert response.status_code == 404 and error_of(response)["code"] == "not_found"

    with_client(talk)


def test_an_error_quotes_no_long_input() -> None:
    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        long = "x" * 100_000
        chat = {"messages": [{"role": "user", "content": "a"}]}
        for path, body in (
            ("/v1/completions", {"model": long, "prompt": "a"}),
            ("/v1/completions", {long: 1, "prompt": "a"}),
            ("/v1/chat/completions", {**chat, "reasoning_effort": long}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a", long: 1}]}),
            (f"/{long[:5000]}", {}),
        ):
            response = await client.post(path, json=body)
            error = error_of(response)
            assert response.status_code in (400, 404) and len(response.content) < 1000
            assert "xxx" in error["message"]
        response = await client.post("/v1/completions", json={"model": long, "prompt": "a"})
        assert error_of(response)["message"].endswith("this server has 'tiny'")

    with_client(talk)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None), max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
FIELDS = sorted(CompletionRequest.model_fields)
LIKELY: dict[str, st.SearchStrategy[Any]] = {
    "prompt": st.sampled_from(["a", "🙂", ["a", "b"], [1, 2], [[1], [2]]]),
    "max_tokens": st.integers(-1, 6),
    "n": st.integers(0, 3),
    "logprobs": st.integers(-1, 21),
    "echo": st.booleans(),
    "stop": st.sampled_from(["a", ["e", " "], [], None]),
    "temperature": st.sampled_from([0, 0.5, 2, 3]),
}


@st.composite
def bodies(draw: st.DrawFn) -> dict[str, Any]:
    """Mostly legal fields, some of any shape."""
    body = {name: draw(values) for name, values in LIKELY.items() if draw(st.booleans())}
    for name in draw(st.lists(st.sampled_from(FIELDS), max_size=2)):
        body[name] = draw(JSON)
    body.setdefault("prompt", "a")
    body.setdefault("max_tokens", 3)
    if draw(st.booleans()):
        del body["prompt"]
        keys = st.sampled_from(["role", "content", "tool_calls", "function", "arguments", "text", "type"])
        part = st.sampled_from(["user", "assistant", "text", "{", None]) | JSON
        message = st.dictionaries(keys, part | st.lists(st.dictionaries(keys, part, max_size=3), max_size=2))
        body["messages"] = draw(st.lists(message, max_size=3))
    return body


@given(st.lists(JSON | bodies(), min_size=1, max_size=12))
@settings(max_examples=50, deadline=None)
def test_no_body_makes_a_500(values: list[Any]) -> None:
    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        for value in values:
            content = json.dumps(value)
            for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
                response = await client.post(path, content=content)
                assert response.status_code in (200, 400, 404)
                if response.status_code != 200:
                    error_of(response)

    with_client(talk)
