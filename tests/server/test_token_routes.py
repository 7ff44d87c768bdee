from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import httpx
import pytest

from rocm_serve.server.app import create_app
from rocm_serve.server.token_routes import MAX_TEXT_MIB
from rocm_serve.tokens.tokenizer import Tokenizer
from tests.server.fake_engine import FakeEngine
from tests.server.http import TOKENIZER, VOCAB, error_of, make_info, refused, with_client
from tests.tokens.tiny import TEMPLATE, build_bpe


def test_tokenize_and_detokenize_are_inverse() -> None:
    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        text = "<|im_start|>naïve café 🙂<think>"
        response = await client.post("/tokenize", json={"prompt": text, "add_special_tokens": False})
        ids = TOKENIZER.encode(text)
        assert response.json() == {"count": len(ids), "max_model_len": 200, "tokens": ids, "token_strs": None}
        response = await client.post("/detokenize", json={"tokens": ids})
        assert response.json() == {"prompt": text}
        response = await client.post("/detokenize", json={"tokens": ids, "skip_special_tokens": True})
        assert response.json() == {"prompt": text.removeprefix("<|im_start|>")}
        response = await client.post("/tokenize", json={"prompt": "", "model": "tiny", "return_token_strs": True})
        assert response.json()["tokens"] == response.json()["token_strs"] == []

    with_client(talk)


def test_tokenize_renders_a_conversation() -> None:
    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        body = {"messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": False}
        response = await client.post("/tokenize", json=body)
        assert TOKENIZER.decode(response.json()["tokens"]) == "<|im_start|>user\nhi<|im_end|>\n"
        error = await refused(client, 400, "/tokenize", messages=[{"role": "user", "content": "\ud800"}])
        assert error["param"] == "messages"

    with_client(talk)


def test_tokenizer_info_has_what_a_remote_tokenizer_reads() -> None:
    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        info = (await client.get("/tokenizer_info")).json()
        assert info["eos_token"] == "<|im_end|>" and info["bos_token"] is None
        assert info["pad_token"] == "<|endoftext|>" and info["chat_template"] == TEMPLATE
        assert info["vocab_size"] == VOCAB
        response = await client.post("/tokenize", json={"prompt": info["eos_token"], "add_special_tokens": False})
        assert response.json()["tokens"] == [TOKENIZER.id_of("<|im_end|>")]

    with_client(talk)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": None}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "\ud800"}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"prompt": "a", "other": 1}, "other"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [VOCAB]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [None]}, "tokens"),
        ("/detokenize", {"tokens": [10**30]}, "tokens"),
    ],
)
def test_bad_bodies_name_the_field(path: str, body: dict[str, object], param: str) -> None:
    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        assert (await refused(client, 400, path, **body))["param"] == param

    with_client(talk)


def test_other_models_are_unknown_here_too() -> None:
    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
            response = await client.post(path, json={"model": "other", **body})
            assert response.status_code == 404 and error_of(response)["code"] == "model_not_found"

    with_client(talk)


def test_lm_evals_own_remote_tokenizer_reads_these_shapes() -> None:
    """The names that lm_eval.utils.RemoteTokenizer reads; the real one runs in the e2e tests."""

    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        assert isinstance((await client.get("/tokenizer_info")).json()["eos_token"], str)
        answer = (await client.post("/tokenize", json={"prompt": "test", "add_special_tokens": False})).json()
        assert isinstance(answer["tokens"], list)
        assert isinstance((await client.post("/detokenize", json={"tokens": [1, 2]})).json()["prompt"], str)

    with_client(talk)


class Listing(Tokenizer):
    """Notes what it is asked to tokenise."""

    def __init__(self) -> None:
        super().__init__(build_bpe(), TOKENIZER.files)
        self.asked: list[str] = []

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        self.asked.append(text)
        return super().encode(text, add_special_tokens)


def with_listing(talk: Callable[[httpx.AsyncClient, Listing], Awaitable[None]]) -> None:
    async def main() -> None:
        tokenizer = Listing()
        transport = httpx.ASGITransport(create_app(FakeEngine(VOCAB, max_model_len=40), tokenizer, make_info()))
        async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client:
            await talk(client, tokenizer)

    asyncio.run(main())


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised() -> None:
    async def talk(client: httpx.AsyncClient, tokenizer: Listing) -> None:
        text = "é" * (tokenizer.max_bytes(40) // 2 + 1)
        error = await refused(client, 400, prompt=text)
        assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
        messages = [{"role": "user", "content": text}]
        error = await refused(client, 400, "/v1/chat/completions", messages=messages)
        assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
        big = "é" * (MAX_TEXT_MIB * 2**19 + 1)
        for body, param in (
            ({"prompt": big}, "prompt"),
            ({"messages": [{"role": "user", "content": big}]}, "messages"),
        ):
            error = await refused(client, 413, "/tokenize", **body)
            assert (error["code"], error["param"]) == ("request_too_large", param)
            assert f"{MAX_TEXT_MIB} MiB" in error["message"]
        assert not tokenizer.asked
        assert (await client.post("/tokenize", json={"prompt": "x" * 10_000})).status_code == 200
        assert len(tokenizer.asked) == 1

    with_listing(talk)


@pytest.mark.parametrize("path", ["/tokenize", "/v1/completions"])
def test_health_answers_while_a_long_text_is_tokenised(path: str) -> None:
    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        ask = asyncio.create_task(client.post(path, json={"prompt": "a" * 600_000}))
        for _ in range(5):
            await asyncio.sleep(0.01)
            assert (await client.get("/health")).status_code == 200
        assert not ask.done()
        assert (await ask).status_code == (200 if path == "/tokenize" else 400)

    with_client(talk, max_model_len=50_000)
