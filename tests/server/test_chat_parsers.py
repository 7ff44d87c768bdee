"""--reasoning-parser and --tool-call-parser over HTTP. The engine follows a script, the template is a Qwen-like one."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

import rocm_serve.checkpoint
from rocm_serve.tokens.tokenizer import Tokenizer
from tests.server.chat_deltas import joined
from tests.server.fake_engine import FakeEngine
from tests.server.http import EOS, TOKENIZER, Json, error_of, make_info, with_client
from tests.tokens.tiny import build_bpe

TEMPLATE = (Path(rocm_serve.checkpoint.__file__).parent / "synthetic_template.jinja").read_text(encoding="utf-8")
QWEN = Tokenizer(build_bpe(), dataclasses.replace(TOKENIZER.files, chat_template=TEMPLATE))
PARSERS = make_info(reasoning_parser="qwen3", tool_call_parser="qwen3_coder")
WEATHER: Json = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "naïve <weather>",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
NAMED: Json = {"type": "function", "function": {"name": "weather"}}
NO_OBJECT: Json = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}
HELLO = [{"role": "user", "content": "hi 🙂"}]
CALL = """<tool_call>
<function=weather>
<parameter=city>
12 é"🙂
</parameter>
<parameter=days>
3
</parameter>
</function>
</tool_call>"""
ARGUMENTS = '{"city": "12 é\\"🙂", "days": 3}'
ANSWER = f"I think\nof 🙂\n</think>\n\nI look.\n\n{CALL}"
BYTES = {QWEN.bytes_of([token]): token for token in range(QWEN.vocab_used) if len(QWEN.bytes_of([token])) == 1}


def in_bytes(text: str) -> list[int]:
    """Write a text with one token per byte."""
    return [BYTES[bytes([byte])] for byte in text.encode("utf-8")]


def ask(script: Sequence[int], *bodies: Json, info: Any = PARSERS, group: int = 1) -> list[tuple[Json, list[Json]]]:
    """Return the whole answer and the chunks of a stream for each body."""
    found: list[tuple[Json, list[Json]]] = []

    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        for body in bodies:
            body = {"messages": HELLO, **body}
            whole = await client.post("/v1/chat/completions", json=body)
            assert whole.status_code == 200, whole.text
            options = {"stream": True, "stream_options": {"include_usage": True}}
            response = await client.post("/v1/chat/completions", json={**body, **options})
            lines = response.text.split("\n\n")
            assert lines[-2:] == ["data: [DONE]", ""]
            chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
            assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole.json()["usage"]
            found.append((whole.json(), chunks[:-1]))

    with_client(talk, info, QWEN, script=script, group=group, max_model_len=4000)
    return found


def seen(answer: tuple[Json, list[Json]]) -> list[Json]:
    """Check that both modes say the same, and return the choices without the random ids of calls."""
    whole, chunks = answer
    shown: list[Json] = []
    for choice, streamed in zip(whole["choices"], joined(chunks), strict=True):
        message = choice["message"]
        ids = {call["id"] for call in message.get("tool_calls", [])}
        assert len(ids) == len(message.get("tool_calls", [])) and all(one.startswith("call_") for one in ids)
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])]
        told = streamed["message"]
        assert [(one["function"]["name"], one["function"]["arguments"]) for one in told["tool_calls"]] == calls
        assert (told["content"] or "") == (message["content"] or "")
        assert told.get("reasoning_content") == message.get("reasoning_content")
        assert streamed["logprobs"] == (choice["logprobs"] and choice["logprobs"]["content"])
        assert all(streamed[name] == choice[name] for name in ("finish_reason", "stop_reason"))
        shown.append(
            {
                "reasoning": message.get("reasoning_content"),
                "content": message["content"],
                "calls": calls,
                "end": choice["finish_reason"],
            }
        )
    return shown


@pytest.mark.parametrize("group", [1, 2, 3, 4, 1000])
@pytest.mark.parametrize("write", [in_bytes, QWEN.encode])
def test_the_answer_is_the_same_for_every_cut_of_its_tokens(group: int, write: Any) -> None:
    (answer,) = ask([*write(ANSWER), EOS[0]], {"tools": [WEATHER]}, group=group)
    expected = {"reasoning": "I think\nof 🙂", "content": "I look.", "calls": [("weather", ARGUMENTS)]}
    assert seen(answer) == [expected | {"end": "tool_calls"}]
    assert answer[0]["usage"]["completion_tokens"] == len(write(ANSWER)) + 1


def test_two_calls_and_n_answers() -> None:
    (answer,) = ask([*in_bytes(f"</think>{CALL}\n{CALL}"), EOS[1]], {"tools": [WEATHER], "n": 2}, group=3)
    expected = {"reasoning": None, "content": None, "calls": [("weather", ARGUMENTS)] * 2, "end": "tool_calls"}
    assert seen(answer) == [expected] * 2


def test_without_parallel_calls_only_the_first_is_one() -> None:
    script = [*in_bytes(f"</think>{CALL}\n{CALL}"), EOS[0]]
    (answer,) = ask(script, {"tools": [WEATHER], "parallel_tool_calls": False})
    assert seen(answer)[0] | {"reasoning": None} == {
        "reasoning": None, "content": CALL, "calls": [("weather", ARGUMENTS)], "end": "tool_calls",
    }  # fmt: skip


def test_a_call_in_the_reasoning_is_found() -> None:
    (answer,) = ask([*in_bytes(f"I call\n{CALL}"), EOS[0]], {"tools": [WEATHER]})
    assert seen(answer)[0]["reasoning"] == "I call" and seen(answer)[0]["calls"] == [("weather", ARGUMENTS)]


def test_an_answer_that_is_too_long_keeps_what_there_is() -> None:
    script = in_bytes(ANSWER)
    inside, in_call = ANSWER.index("</think>"), ANSWER.index("🙂", 20)
    sizes = [len(ANSWER[:place].encode()) for place in (inside, in_call)]
    thinking, calling = ask(script, *({"tools": [WEATHER], "max_tokens": size} for size in sizes))
    assert seen(thinking) == [{"reasoning": "I think\nof 🙂\n", "content": None, "calls": [], "end": "length"}]
    assert seen(calling)[0]["calls"] == [("weather", '{"city": "12 é\\"')] and seen(calling)[0]["end"] == "length"


def test_text_that_is_no_call_stays_content() -> None:
    broken = '<tool_call>\n{"name": "weather"}\n</tool_call>'
    (answer,) = ask([*in_bytes(f"</think>{broken}"), EOS[0]], {"tools": [WEATHER]}, group=2)
    assert seen(answer) == [{"reasoning": None, "content": broken, "calls": [], "end": "stop"}]


def test_thinking_is_off_when_the_prompt_closes_it() -> None:
    body = {"chat_template_kwargs": {"enable_thinking": False}}
    (answer,) = ask([*in_bytes("Hello </think>"), EOS[0]], body)
    assert seen(answer) == [{"reasoning": None, "content": "Hello </think>", "calls": [], "end": "stop"}]


def test_a_request_can_leave_reasoning_in_the_content() -> None:
    script = [*in_bytes(ANSWER), EOS[0]]
    kept, parsed = ask(script, {"separate_reasoning": False}, {"separate_reasoning": True})
    assert kept[0]["choices"][0]["message"] == {"role": "assistant", "content": ANSWER, "refusal": None}
    assert seen(kept)[0]["content"] == ANSWER
    assert seen(parsed)[0]["content"] == f"I look.\n\n{CALL}" and seen(parsed)[0]["end"] == "stop"


def test_without_flags_all_is_content() -> None:
    (answer,) = ask([*in_bytes(ANSWER), EOS[0]], {"separate_reasoning": False}, info=make_info())
    assert answer[0]["choices"][0]["message"] == {"role": "assistant", "content": ANSWER, "refusal": None}
    assert seen(answer)[0]["content"] == ANSWER


@pytest.mark.parametrize("group", [1, 4, 1000])
def test_log_probs_and_stop_strings_go_on_working(group: int) -> None:
    script = [*QWEN.encode(ANSWER), EOS[0]]
    scored, stopped, stopped_in_call = ask(
        script,
        {"tools": [WEATHER], "logprobs": True, "top_logprobs": 2},
        {"tools": [WEATHER], "stop": "ook"},
        {"tools": [WEATHER], "stop": "days>"},
        group=group,
    )
    content = scored[0]["choices"][0]["logprobs"]["content"]
    assert seen(scored)[0]["calls"] == [("weather", ARGUMENTS)]
    assert [QWEN.token_string(token) for token in script] == [one["token"] for one in content]
    assert seen(stopped) == [{"reasoning": "I think\nof 🙂", "content": "I l", "calls": [], "end": "stop"}]
    assert stopped[0]["choices"][0]["stop_reason"] == "ook"
    cut = seen(stopped_in_call)[0]
    assert cut["end"] == "stop" and cut["calls"] == [("weather", '{"city": "12 é\\"🙂"')]
    assert cut["content"] == "I look.\n\n\n<parameter="  # the unfinished tag is shown


def test_a_stop_token_of_the_model_ends_an_answer_that_is_whole() -> None:
    unclosed = CALL[: CALL.index("</function>")]
    script = [*in_bytes(f"</think>{unclosed}"), EOS[0]]
    own, foreign = ask(
        script, {"tools": [WEATHER], "stop_token_ids": [EOS[0]]}, {"tools": [WEATHER], "stop_token_ids": [script[-2]]}
    )
    assert seen(own)[0]["calls"] == [("weather", ARGUMENTS)] and seen(own)[0]["end"] == "tool_calls"
    assert seen(foreign)[0]["end"] == "stop"


def prompt_of(messages: list[Json], tools: list[Json] | None, **values: Any) -> tuple[int, ...]:
    """The prompt as Transformers renders it."""
    ((text,), _) = render_jinja_template(
        [messages], tools=tools, chat_template=TEMPLATE, add_generation_prompt=True, **values
    )
    return tuple(QWEN.encode(text))


def test_tools_and_their_messages_reach_the_template() -> None:
    arguments: Json = {"city": "Paris", "days": 2, "where": {"a": [None, True]}}
    function = {"name": "weather", "arguments": arguments}
    past: list[Json] = [
        *HELLO,
        {"role": "assistant", "reasoning_content": "so", "content": "", "tool_calls": [{"function": function}]},
        {"role": "tool", "content": "sunny"},
        {"role": "tool", "content": "cold"},
    ]
    sent = json.loads(json.dumps(past))
    sent[1]["content"] = None
    sent[1]["tool_calls"] = [
        {"id": "call_1", "type": "function", "function": {**function, "arguments": json.dumps(arguments)}}
    ]
    sent[2]["tool_call_id"] = "call_1"

    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        for body in (
            {"messages": sent, "tools": [WEATHER]},
            {"messages": sent, "tools": [WEATHER], "tool_choice": "none"},
            {"messages": HELLO, "tools": [WEATHER], "tool_choice": "auto", "parallel_tool_calls": True},
            {"messages": HELLO, "tools": [], "tool_choice": "none"},
            {"messages": HELLO, "tool_choice": "auto", "parallel_tool_calls": False},
        ):
            response = await client.post("/v1/chat/completions", json={**body, "max_tokens": 1})
            assert response.status_code == 200, response.text
        prompts = [request.prompt for request in engine.seen]
        assert prompts[0] == prompt_of(past, [WEATHER])
        assert prompts[1] == prompt_of(past, None)
        assert prompts[2] == prompt_of(HELLO, [WEATHER])
        assert prompts[3] == prompt_of(HELLO, None)
        counted = await client.post("/tokenize", json={"messages": sent, "tools": [WEATHER]})
        assert tuple(counted.json()["tokens"]) == prompts[0]

    with_client(talk, PARSERS, QWEN, max_model_len=4000)


def test_with_tool_choice_none_nothing_is_parsed() -> None:
    (answer,) = ask([*in_bytes(f"</think>{CALL}"), EOS[0]], {"tools": [WEATHER], "tool_choice": "none"})
    assert seen(answer) == [{"reasoning": None, "content": CALL, "calls": [], "end": "stop"}]


def test_an_answer_can_be_sent_back_as_it_came() -> None:
    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        body = {"messages": HELLO, "tools": [WEATHER]}
        message = (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]["message"]
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "sunny"}
        again = await client.post("/v1/chat/completions", json={**body, "messages": [*HELLO, message, result]})
        assert again.status_code == 200, again.text
        first, second = (engine.seen[place].prompt for place in (0, 1))
        turn = QWEN.encode(f"{ANSWER}<|im_end|>\n")
        assert second[: len(first) + len(turn)] == (*first, *turn)

    with_client(talk, PARSERS, QWEN, script=[*QWEN.encode(ANSWER), EOS[0]], max_model_len=4000)


def function(**changes: object) -> Json:
    return {"type": "function", "function": {"name": "f", **changes}}


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"tools": [WEATHER], "tool_choice": "required"}, "tool_choice", "'auto' or 'none'"),
        ({"tools": [WEATHER], "tool_choice": NAMED}, "tool_choice", "'auto' or 'none'"),
        ({"tools": [WEATHER], "tool_choice": 5}, "tool_choice", "'auto' or 'none'"),
        ({"tools": [{"type": "web_search"}]}, "tools", "tools[0].type"),
        ({"tools": [WEATHER, {"type": "function"}]}, "tools", "tools[1].function"),
        ({"tools": [function(name="")]}, "tools", "tools[0].function.name"),
        ({"tools": [function(name="a>b")]}, "tools", "tools[0].function.name"),
        ({"tools": [function(name=5)]}, "tools", "tools[0].function.name"),
        ({"tools": [function(), function()]}, "tools", "'f' comes twice"),
        ({"tools": [function(parameters=[])]}, "tools", "tools[0].function.parameters"),
        ({"tools": [function(description=5)]}, "tools", "tools[0].function.description"),
        ({"tools": [function(description="\ud800")]}, "tools", "surrogate"),
        ({"tools": [5]}, "tools", "tools"),
        ({"functions": [{"name": "f"}]}, "functions", "unknown field"),
        ({"messages": [NO_OBJECT]}, "messages", "must be a JSON object"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_by_name(body: Json, param: str, says: str) -> None:
    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        for mode in ({}, {"stream": True}):
            content = json.dumps({"messages": HELLO, **body, **mode})
            response = await client.post("/v1/chat/completions", content=content)
            error = error_of(response)
            assert response.status_code == 400 and error["param"] == param and says in error["message"], error
        assert not engine.seen

    with_client(talk, PARSERS, QWEN)


def test_a_server_without_the_flags_says_which_one_is_missing() -> None:
    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        for body, flag in (
            ({"tools": [WEATHER]}, "--tool-call-parser qwen3_coder"),
            ({"separate_reasoning": True}, "--reasoning-parser qwen3"),
        ):
            response = await client.post("/v1/chat/completions", json={"messages": HELLO, **body})
            error = error_of(response)
            assert response.status_code == 400 and error["param"] == next(iter(body)) and flag in error["message"]

    with_client(talk, make_info(), QWEN)


def test_a_template_that_does_not_show_tools_is_named() -> None:
    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        response = await client.post("/v1/chat/completions", json={"messages": HELLO, "tools": [WEATHER]})
        error = error_of(response)
        assert response.status_code == 400 and error["param"] == "tools" and "chat template" in error["message"]
        response = await client.post("/tokenize", json={"prompt": "x", "tools": [WEATHER]})
        assert response.status_code == 400 and error_of(response)["param"] == "tools"

    with_client(talk, PARSERS)
