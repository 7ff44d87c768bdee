"""The synthetic tokenizer and chat template behave like the published ones."""

from __future__ import annotations

import unicodedata
from pathlib import Path
from typing import Any

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from rocm_serve.checkpoint.reader import read_config
from rocm_serve.checkpoint.synthetic_tokenizer import ADDED_TOKENS

TEXTS = [
    "Hello world, it's 12345.67!\n\n  two  spaces",
    "naïve cafe\u0301 über 你好，世界 Привет नमस्ते 🙂👍🏽",
    "<|im_start|>user\nhi<|im_end|>\n<think>\nno\n</think>\n\n<tool_call>x</tool_call>",
    "",
    " ",
    "\r\n\t",
]


@pytest.fixture(scope="module")
def tokenizer(checkpoints: dict[str, Path]) -> Tokenizer:
    return Tokenizer.from_file(str(checkpoints["text-fp8"] / "tokenizer.json"))


@given(text=st.text(max_size=60))
def test_any_text_survives_a_round_trip_in_normal_form(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=True).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == unicodedata.normalize("NFC", text)


def test_digits_are_single_tokens_and_no_bos_is_added(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("1234567890").ids
    assert [tokenizer.decode([i]) for i in ids] == list("1234567890")


def test_marks_stay_with_their_letters(tokenizer: Tokenizer) -> None:
    pieces = tokenizer.pre_tokenizer.pre_tokenize_str("a\u0301b! नमस्ते")
    assert len(pieces) == 3


def test_english_costs_far_fewer_tokens_than_bytes(tokenizer: Tokenizer) -> None:
    text = "How many apples does Mary have left after she gives away half of them?"
    assert len(tokenizer.encode(text).ids) < len(text) / 3


def test_added_tokens_are_single_and_those_of_the_parsers_survive_skipping(tokenizer: Tokenizer) -> None:
    assert len(ADDED_TOKENS) == 33
    for name, special in ADDED_TOKENS.items():
        ids = tokenizer.encode(f"a{name}b").ids
        assert len(ids) == 3 and tokenizer.id_to_token(ids[1]) == name
        assert tokenizer.decode(ids, skip_special_tokens=True) == ("ab" if special else f"a{name}b")
    for name in ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"):
        assert not ADDED_TOKENS[name]
    for name in ("<|endoftext|>", "<|im_start|>", "<|im_end|>"):
        assert ADDED_TOKENS[name]


def test_some_rows_of_the_matrices_have_no_token(tokenizer: Tokenizer, checkpoints: dict[str, Path]) -> None:
    config, generation = read_config(checkpoints["text-fp8"])
    assert isinstance(config["vocab_size"], int) and generation is not None
    assert 0 < config["vocab_size"] - tokenizer.get_vocab_size() < 64
    assert max(tokenizer.get_vocab().values()) == tokenizer.get_vocab_size() - 1
    ends = [tokenizer.token_to_id(name) for name in ("<|im_end|>", "<|endoftext|>")]
    assert generation["eos_token_id"] == ends
    assert config["eos_token_id"] == ends[1]


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning", "ignore:.*:FutureWarning", "ignore:.*:UserWarning")
@pytest.mark.parametrize("name", ["text-fp8", "text-bf16", "vl-fp8", "dense"])
def test_transformers_reads_the_same_tokenizer(tokenizer: Tokenizer, checkpoints: dict[str, Path], name: str) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(checkpoints[name])
    assert (theirs.eos_token, theirs.pad_token, theirs.bos_token) == ("<|im_end|>", "<|endoftext|>", None)
    for text in TEXTS:
        assert theirs.encode(text) == tokenizer.encode(text).ids, text


@pytest.fixture(scope="module")
def template(checkpoints: dict[str, Path]) -> jinja2.Template:
    def refuse(message: str) -> None:
        raise ValueError(message)

    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = refuse
    return environment.from_string((checkpoints["text-fp8"] / "chat_template.jinja").read_text(encoding="utf-8"))


USER = {"role": "user", "content": "hi"}
CALL = {"function": {"name": "weather", "arguments": {"city": "Paris", "days": 2}}}


def render(template: jinja2.Template, *messages: dict[str, Any], **values: Any) -> str:
    return template.render(messages=messages, **{"add_generation_prompt": True, "reasoning_effort": "medium"} | values)


def test_a_turn_ends_in_an_open_think_block_or_in_an_empty_one(template: jinja2.Template) -> None:
    opened = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert render(template, USER) == opened
    assert render(template, USER, enable_thinking=False) == f"{opened}\n</think>\n\n"
    assert render(template, USER, add_generation_prompt=False) == "<|im_start|>user\nhi<|im_end|>\n"


def test_effort_puts_a_sentence_first_and_unknown_values_are_refused(template: jinja2.Template) -> None:
    low = render(template, {"role": "system", "content": "Be kind."}, USER, reasoning_effort="low")
    assert low.startswith("<|im_start|>system\nThink briefly before you answer.\n\nBe kind.<|im_end|>\n")
    default = template.render(messages=[USER])
    assert default.startswith("<|im_start|>system\nThink this through")
    for effort in ("high", "none"):
        with pytest.raises(ValueError, match="xhigh, medium, low"):
            render(template, USER, reasoning_effort=effort)


def test_past_thinking_is_kept_unless_it_is_asked_not_to(template: jinja2.Template) -> None:
    past = {"role": "assistant", "content": "4", "reasoning_content": "2+2"}
    kept = render(template, USER, past, USER)
    assert "<|im_start|>assistant\n<think>\n2+2\n</think>\n\n4<|im_end|>\n" in kept
    dropped = render(template, USER, past, USER, preserve_thinking=False)
    assert "2+2" not in dropped and "<|im_start|>assistant\n4<|im_end|>\n" in dropped


def test_tools_are_listed_one_a_line_before_the_system_text(template: jinja2.Template) -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("a", "b")]
    text = render(template, {"role": "system", "content": "Be kind."}, USER, tools=tools)
    head = text.split("<|im_end|>")[0]
    assert head.startswith("<|im_start|>system\n# Tools\n")
    assert [line for line in head.splitlines() if line.startswith("{")] == [
        '{"function": {"name": "a"}, "type": "function"}',
        '{"function": {"name": "b"}, "type": "function"}',
    ]
    assert head.endswith("</IMPORTANT>\n\nBe kind.")


def test_calls_and_their_results_are_written_as_the_parsers_read_them(template: jinja2.Template) -> None:
    call = {"role": "assistant", "content": "Let me look.", "tool_calls": [CALL, CALL]}
    results = [{"role": "tool", "content": "sunny"}, {"role": "tool", "content": "rainy"}]
    text = render(template, USER, call, *results)
    one = (
        "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n"
        "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>"
    )
    assert f"Let me look.\n\n{one}\n{one}<|im_end|>\n" in text
    shared = "\n<tool_response>\nsunny\n</tool_response>\n<tool_response>\nrainy\n</tool_response><|im_end|>\n"
    assert f"<|im_start|>user{shared}<|im_start|>assistant\n" in text


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "must not be empty"),
        ([USER, {"role": "system", "content": "late"}], "must be the first message"),
        ([{"role": "critic", "content": "x"}], "unknown role 'critic'"),
        ([{"role": "user", "content": [{"type": "image"}]}], "type 'image' is not supported"),
    ],
)
def test_a_conversation_that_cannot_be_written_is_refused(
    template: jinja2.Template, messages: list[dict[str, Any]], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        render(template, *messages)


def test_text_parts_are_joined(template: jinja2.Template) -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    assert "<|im_start|>user\nab<|im_end|>" in render(template, parts)
