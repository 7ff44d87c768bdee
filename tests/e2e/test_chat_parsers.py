"""A served model that really writes a tool call: each token decides the next one, and the chain ends the answer.

The layers of a dense checkpoint add nothing to its residual stream, and row n of lm_head is the embedding of the token
before n in the chain. So the greedy answer follows the chain from the last token of the prompt.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken
from tokenizers import Tokenizer as BpeTokenizer

from rocm_serve.tokens.tokenizer import Tokenizer
from tests.e2e.harness import Server
from tests.server.chat_deltas import joined
from tests.server.http import Json, error_of

# No token may come twice, so two end tags become tokens of their own.
WHOLE_TAGS = ("</parameter>", "</function>")
CHAIN = (
    "\n", "city", "?", "</think>", "\n\n", "I", " get", ".", "<tool_call>", "<function", "=get", ">\n", "<parameter",
    "=city", ">", " ", "1", "2", *WHOLE_TAGS, "</tool_call>", "<|im_end|>",
)  # fmt: skip
TOOL: Json = {
    "type": "function",
    "function": {"name": "get", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
FLAGS = ("--reasoning-parser", "qwen3", "--tool-call-parser", "qwen3_coder")
BODY: Json = {"messages": [{"role": "user", "content": "hi"}], "temperature": 0}


def add_tokens(directory: Path) -> Tokenizer:
    path = str(directory / "tokenizer.json")
    bpe = BpeTokenizer.from_file(path)
    bpe.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in WHOLE_TAGS])
    bpe.save(path)
    return Tokenizer.from_dir(directory)


def follow(directory: Path, chain: Sequence[int]) -> None:
    """Write the weights that make a model follow `chain`."""
    assert len(set(chain)) == len(chain)
    files = {path: load_file(path) for path in directory.glob("*.safetensors")}
    (embedding,) = (
        tensors[name] for tensors in files.values() for name in tensors if name.endswith("embed_tokens.weight")
    )
    for path, tensors in files.items():
        for name, tensor in tensors.items():
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "lm_head.weight")):
                tensor.zero_()
            if name == "model.norm.weight":
                tensor.zero_()
            if name == "lm_head.weight":
                for before, after in pairwise(chain):
                    tensor[after] = torch.nn.functional.normalize(embedding[before].float(), dim=0)
        save_file(tensors, path, metadata={"format": "pt"})


@pytest.fixture(scope="module")
def caller(checkpoint_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("caller") / "model"
    shutil.copytree(checkpoint_of("dense"), directory)
    tokenizer = add_tokens(directory)
    ids = [tokenizer.encode(text) for text in CHAIN]
    assert all(len(one) == 1 for one in ids), [text for text, one in zip(CHAIN, ids, strict=True) if len(one) != 1]
    follow(directory, [one[0] for one in ids])
    return directory


def both_modes(server: Server, body: Json) -> tuple[Json, Json]:
    """Return the choice of the whole answer, and that of the stream put together."""
    (whole,) = server.post("/v1/chat/completions", body)["choices"]
    with server.client() as client:
        response = client.post("/v1/chat/completions", json={**body, "stream": True})
    assert response.status_code == 200, response.text
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    (streamed,) = joined([json.loads(line) for line in lines[:-1]])
    return whole, streamed


def test_a_call_is_thought_of_written_and_sent_back(caller: Path, tmp_path: Path) -> None:
    with Server(caller, tmp_path / "parsed", FLAGS) as server:
        whole, streamed = both_modes(server, {**BODY, "tools": [TOOL]})
        for choice in (whole, streamed):
            assert choice["finish_reason"] == "tool_calls"
            message = choice["message"]
            assert message["reasoning_content"] == "city?" and message["content"] == "I get."
            (call,) = message["tool_calls"]
            assert call["function"] == {"name": "get", "arguments": '{"city": " 12"}'}
        result = {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}
        again = {**BODY, "tools": [TOOL], "messages": [*BODY["messages"], whole["message"], result]}
        assert both_modes(server, again)[0]["message"]["tool_calls"][0]["function"] == call["function"]
        (cut,) = server.post("/v1/chat/completions", {**BODY, "tools": [TOOL], "max_tokens": 2})["choices"]
        assert cut["message"]["content"] is None and cut["message"]["reasoning_content"] == "city?"
        assert cut["finish_reason"] == "length"
        (unasked,) = server.post("/v1/chat/completions", BODY)["choices"]
        assert unasked["message"]["content"] == "".join(CHAIN[5:-1]) and "tool_calls" not in unasked["message"]


def test_without_the_flags_the_text_is_whole_and_tools_are_refused(caller: Path, tmp_path: Path) -> None:
    with Server(caller, tmp_path / "plain") as server:
        (choice,) = server.post("/v1/chat/completions", BODY)["choices"]
        assert choice["message"] == {"role": "assistant", "content": "".join(CHAIN[1:-1]), "refusal": None}
        with server.client() as client:
            response = client.post("/v1/chat/completions", json={**BODY, "tools": [TOOL]})
        assert response.status_code == 400 and "--tool-call-parser qwen3_coder" in error_of(response)["message"]
