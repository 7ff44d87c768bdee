from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.server.fake_engine import FakeEngine
from tests.server.http import EOS, TOKENIZER, Json, error_of, with_client

HELLO = [{"role": "user", "content": "hi 🙂"}]
PROMPT = "<|im_start|>user\nhi 🙂<|im_end|>\n<|im_start|>assistant\n<think>\n"
GREEDY: Json = {"messages": HELLO, "temperature": 0, "ignore_eos": True}


async def chat(client: httpx.AsyncClient, **body: Any) -> Json:
    response = await client.post("/v1/chat/completions", json={"model": "tiny", **body})
    assert response.status_code == 200, response.text
    answer: Json = response.json()
    return answer


async def chunks(client: httpx.AsyncClient, **body: Any) -> list[Json]:
    response = await client.post("/v1/chat/completions", json={"stream": True, **body})
    assert response.status_code == 200, response.text
    lines = response.text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def joined(parts: list[Json]) -> list[Json]:
    """Put the deltas together as the whole answer has them."""
    choices: dict[int, Json] = {}
    for part in (part for chunk in parts for part in chunk["choices"]):
        known = choices.setdefault(
            part["index"],
            {"index": part["index"], "message": {"content": "", "refusal": None}, "logprobs": None},
        )
        known["message"] |= {name: value for name, value in part["delta"].items() if name == "role"}
        known["message"]["content"] += part["delta"].get("content", "")
        if part["logprobs"] is not None:
            before = known["logprobs"]["content"] if known["logprobs"] else []
            known["logprobs"] = {"content": before + part["logprobs"]["content"], "refusal": None}
        known |= {name: part[name] for name in ("finish_reason", "stop_reason")}
    return [choices[index] for index in sorted(choices)]


def test_the_template_makes_the_prompt_and_both_modes_agree() -> None:
    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        body = {**GREEDY, "max_tokens": 6, "n": 2, "logprobs": True, "top_logprobs": 2}
        answer = await chat(client, **body)
        assert engine.seen[0].prompt == tuple(TOKENIZER.encode(PROMPT))
        assert answer["object"] == "chat.completion" and answer["id"].startswith("chatcmpl-")
        parts = await chunks(client, stream_options={"include_usage": True}, **body)
        assert joined(parts) == answer["choices"]
        assert {part["object"] for part in parts} == {"chat.completion.chunk"}
        assert parts[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert parts[-1]["choices"] == [] and parts[-1]["usage"] == answer["usage"]
        so_far = await chunks(client, stream_options={"include_usage": True, "continuous_usage_stats": True}, **body)
        assert so_far[0]["usage"]["completion_tokens"] == 0 and so_far[-2]["usage"] == so_far[-1]["usage"]
        assert so_far[-1]["usage"] == answer["usage"]
        made: list[int] = []
        for _ in range(6):
            made.append(int(engine.logits([*engine.seen[0].prompt, *made]).argmax()))
        for choice in answer["choices"]:
            content = choice["logprobs"]["content"]
            assert len(content) == 6 and all(len(one["top_logprobs"]) == 2 for one in content)
            assert all(
                bytes(one["bytes"]) == TOKENIZER.bytes_of([token]) for one, token in zip(content, made, strict=True)
            )

    with_client(talk)


def test_an_answer_ends_at_eos_and_without_max_tokens_it_may_fill_the_context() -> None:
    script = [*TOKENIZER.encode("hello</think>"), EOS[0]]

    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        (choice,) = (await chat(client, messages=HELLO))["choices"]
        assert choice["message"] == {"role": "assistant", "content": "hello</think>", "refusal": None}
        assert choice["finish_reason"] == "stop" and choice["logprobs"] is None
        assert engine.seen[0].params.max_tokens == 200 - len(TOKENIZER.encode(PROMPT))
        assert joined(await chunks(client, messages=HELLO)) == [choice]

    with_client(talk, script=script)


def test_text_parts_are_joined_and_values_reach_the_template() -> None:
    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        parts = [{"type": "text", "text": "hi "}, {"type": "text", "text": "🙂"}]
        await chat(client, messages=[{"role": "user", "content": parts}], max_completion_tokens=1)
        assert engine.seen[0].prompt == tuple(TOKENIZER.encode(PROMPT))
        await chat(client, messages=HELLO, max_tokens=1, add_generation_prompt=False)
        assert TOKENIZER.decode(engine.seen[1].prompt).endswith("<|im_end|>\n")

    with_client(talk)


CALL = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


def test_past_tool_calls_reach_the_template_as_objects() -> None:
    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        messages = [
            *HELLO,
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": "2"},
        ]
        await chat(client, messages=messages, max_tokens=1)
        assert "<|im_start|>tool\n2<|im_end|>" in TOKENIZER.decode(engine.seen[0].prompt)

    with_client(talk)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [5]}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "user", "content": None}]}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
        ({"messages": [{"role": "user", "content": "a\u0000"}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x " * 300}]}, "messages"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            "messages",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": [5]}]}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": 5}]}, "messages"),
        ({"messages": HELLO, "max_tokens": 0}, "max_tokens"),
        ({"messages": HELLO, "max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ({"messages": HELLO, "max_completion_tokens": 500}, "max_completion_tokens"),
        ({"messages": HELLO, "top_logprobs": 2}, "top_logprobs"),
        ({"messages": HELLO, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"messages": HELLO, "logprobs": 1}, "logprobs"),
        ({"messages": HELLO, "tools": [{"type": "function"}]}, "tools"),
        ({"messages": HELLO, "response_format": {"type": "json_object"}}, "response_format.type"),
        ({"messages": HELLO, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"messages": HELLO, "n": 5000}, "n"),
        ({"messages": HELLO, "reasoning_effort": "extreme"}, "reasoning_effort"),
        ({"messages": HELLO, "reasoning_effort": 5}, "reasoning_effort"),
        ({"messages": HELLO, "chat_template_kwargs": {"reasoning_effort": "extreme"}}, "chat_template_kwargs"),
        (
            {"messages": HELLO, "reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
            "reasoning_effort",
        ),
    ],
)
def test_bad_bodies_name_the_field_in_both_modes(body: Json, param: str) -> None:
    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        for mode in ({}, {"stream": True}):
            response = await client.post("/v1/chat/completions", content=json.dumps({**body, **mode}))
            assert response.status_code == 400 and error_of(response)["param"] == param
        assert not engine.seen

    with_client(talk)


@pytest.mark.parametrize(
    ("role", "key", "value"),
    [
        ("user", "contents", "x"),
        ("user", "cache_control", None),
        ("user", "refusal", "no"),
        ("user", "name", 5),
        ("user", "reasoning_content", "x"),
        ("user", "tool_call_id", "x"),
        ("user", "tool_calls", [CALL]),
        ("assistant", "reasoning_content", ["x"]),
        ("tool", "tool_call_id", 5),
    ],
)
def test_a_key_of_a_message_that_has_no_effect_or_the_wrong_type_is_refused_by_name(
    role: str, key: str, value: object
) -> None:
    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        messages = [*HELLO, {"role": role, "content": "x", key: value}]
        response = await client.post("/v1/chat/completions", json={"messages": messages})
        error = error_of(response)
        assert response.status_code == 400 and error["param"] == "messages"
        assert f"messages[{len(HELLO)}]" in error["message"] and key in error["message"]

    with_client(talk)


def test_an_answer_of_openais_shape_can_be_sent_back() -> None:
    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        names = ("refusal", "annotations", "audio", "function_call", "tool_calls", "reasoning_content", "name")
        answer = {"role": "assistant", "content": "x", **dict.fromkeys(names)}
        await chat(client, messages=[*HELLO, answer, {"role": "user", "name": "u", "content": "x"}], max_tokens=1)
        await chat(client, messages=HELLO, max_tokens=1, reasoning_effort="low")

    with_client(talk)


def test_an_engine_fault_reaches_the_reader_of_a_stream() -> None:
    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        parts = await chunks(client, **GREEDY)
        assert parts[-1]["error"]["message"] == "the planted fault"
        response = await client.post("/v1/chat/completions", json=GREEDY)
        assert response.status_code == 500 and response.json() == parts[-1]

    with_client(talk, fail_after=2)
