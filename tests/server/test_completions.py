from __future__ import annotations

from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rocm_serve.tokens.tokenizer import byte_of_char
from tests.server.fake_engine import FakeEngine
from tests.server.http import EOS, TOKENIZER, VOCAB, both_modes, complete, events, joined, make_info, with_client
from tests.tokens.test_detokenizer import byte_ids

PROMPTS = ["The quick brown fox", "naïve café 🙂", "Question: how many eggs?"]
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


def check_scores(choice: dict[str, Any], sequence: list[int], engine: FakeEngine) -> None:
    """Every entry from the first shown token on equals the engine's own log-softmax; the arg max is there."""
    logprobs = choice["logprobs"]
    assert {len(values) for values in logprobs.values()} == {len(sequence)}
    for place, token in enumerate(sequence):
        if place == 0:
            assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
            continue
        judge = engine.entry(sequence[:place], token, 1)
        assert logprobs["token_logprobs"][place] == pytest.approx(judge.logprob, abs=1e-4)
        top = logprobs["top_logprobs"][place]
        assert max(top.values()) == pytest.approx(judge.top_logprobs[0], abs=1e-4)
        assert top[logprobs["tokens"][place]] == logprobs["token_logprobs"][place]
        is_best = logprobs["token_logprobs"][place] == max(top.values())
        assert is_best == (judge.top_ids[0] == token)
    edges = [*logprobs["text_offset"], len(choice["text"])]
    assert edges == sorted(edges)
    assert "".join(choice["text"][a:b] for a, b in zip(edges, edges[1:], strict=False)) == choice["text"]


@pytest.mark.parametrize("as_ids", [False, True])
def test_echo_with_logprobs_scores_every_prompt_token_and_one_made_token(as_ids: bool) -> None:
    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        ids = [TOKENIZER.encode(text) for text in PROMPTS]
        choices = await both_modes(
            client, prompt=ids if as_ids else PROMPTS, echo=True, logprobs=1, max_tokens=1, temperature=0
        )
        assert [choice["index"] for choice in choices] == [0, 1, 2]
        for text, prompt, choice in zip(PROMPTS, ids, choices, strict=True):
            made = int(engine.logits(prompt).argmax())
            assert choice["text"] == TOKENIZER.decode([*prompt, made]) and choice["text"].startswith(text)
            check_scores(choice, [*prompt, made], engine)

    with_client(talk)


def test_one_eos_token_still_takes_an_entry_when_a_prompt_is_scored() -> None:
    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        prompt = TOKENIZER.encode(PROMPTS[0])
        (choice,) = await both_modes(client, prompt=[prompt], echo=True, logprobs=1, max_tokens=1, temperature=0)
        assert choice["text"] == PROMPTS[0] and choice["finish_reason"] == "stop"
        assert len(choice["logprobs"]["tokens"]) == len(prompt) + 1
        assert choice["logprobs"]["tokens"][-1] == "<|im_end|>"
        assert choice["logprobs"]["text_offset"][-1] == len(PROMPTS[0])

    with_client(talk, script=[EOS[0]])


def test_max_tokens_zero_with_echo_only_scores() -> None:
    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        prompt = TOKENIZER.encode(PROMPTS[1])
        (choice,) = await both_modes(client, prompt=PROMPTS[1], echo=True, logprobs=2, max_tokens=0)
        assert choice["text"] == PROMPTS[1] and choice["finish_reason"] == "length"
        check_scores(choice, prompt, engine)
        answer = await complete(client, prompt=PROMPTS[1], echo=True, max_tokens=0)
        assert answer["usage"] == {
            "prompt_tokens": len(prompt),
            "completion_tokens": 0,
            "total_tokens": len(prompt),
        }
        assert answer["choices"][0]["logprobs"] is None

    with_client(talk)


def test_logprobs_zero_gives_the_tokens_own_values() -> None:
    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        (choice,) = await both_modes(client, prompt="a", logprobs=0, max_tokens=5, **GREEDY)
        assert all(len(top) == 1 for top in choice["logprobs"]["top_logprobs"])
        (bare,) = await both_modes(client, prompt="a", max_tokens=5, **GREEDY)
        assert bare["logprobs"] is None and bare["text"] == choice["text"]

    with_client(talk)


def test_return_tokens_as_token_ids_names_ids() -> None:
    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        body = {"prompt": "a", "logprobs": 1, "max_tokens": 2, "return_tokens_as_token_ids": True, **GREEDY}
        (choice,) = await both_modes(client, **body)
        prompt = TOKENIZER.encode("a")
        assert choice["logprobs"]["tokens"][0] == f"token_id:{int(engine.logits(prompt).argmax())}"

    with_client(talk)


def test_prompt_logprobs_follow_vllms_shape() -> None:
    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        prompt = TOKENIZER.encode(PROMPTS[0])
        (choice,) = await both_modes(client, prompt=prompt, prompt_logprobs=2, max_tokens=1, **GREEDY)
        assert choice["prompt_logprobs"][0] is None and len(choice["prompt_logprobs"]) == len(prompt)
        for place in range(1, len(prompt)):
            judge = engine.entry(prompt[:place], prompt[place], 2)
            found = choice["prompt_logprobs"][place]
            assert set(found) == {str(i) for i in (prompt[place], *judge.top_ids)}
            assert found[str(judge.top_ids[0])]["rank"] == 1
            assert found[str(prompt[place])]["logprob"] == pytest.approx(judge.logprob)
        (choice,) = await both_modes(client, prompt=prompt, prompt_logprobs=1, max_tokens=0)
        assert choice["text"] == "" and len(choice["prompt_logprobs"]) == len(prompt)

    with_client(talk)


STOP_TEXT = "The quick brown fox jumps over the lazy dog"


@pytest.mark.parametrize("group", [1, 2, 5])
@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(
    ("stop", "matched"),
    [("ick bro", "ick bro"), (["zzz", "n fox j"], "n fox j"), (["over the", "over"], "over"), ("dog", "dog")],
)
def test_a_stop_string_over_token_borders_leaks_no_byte(
    group: int, include: bool, stop: str | list[str], matched: str
) -> None:
    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        body = {"prompt": "x", "stop": stop, "max_tokens": 100, "logprobs": 1, "include_stop_str_in_output": include}
        (choice,) = await both_modes(client, **body)
        end = STOP_TEXT.index(matched) + (len(matched) if include else 0)
        assert choice["text"] == STOP_TEXT[:end]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", matched)
        assert all(offset <= end for offset in choice["logprobs"]["text_offset"])
        answer = await complete(client, **body)
        used = answer["usage"]["completion_tokens"]
        assert matched in TOKENIZER.decode(script[:used]) and matched not in TOKENIZER.decode(script[: used - 1])
        assert len(choice["logprobs"]["tokens"]) == used
        assert not engine.aborted
        assert len(engine.completed) == 3 or used % group == 0

    script = TOKENIZER.encode(STOP_TEXT)
    with_client(talk, script=script, group=group)


def test_text_kept_back_for_a_stop_that_never_comes_is_in_the_answer() -> None:
    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        script = TOKENIZER.encode(STOP_TEXT)
        (choice,) = await both_modes(client, prompt="x", stop=["dogma"], max_tokens=len(script))
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (STOP_TEXT, "length", None)

    with_client(talk, script=TOKENIZER.encode(STOP_TEXT))


def test_min_tokens_passes_over_stop_strings_that_come_too_soon() -> None:
    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        (choice,) = await both_modes(client, prompt="x", stop="b", max_tokens=9, min_tokens=3)
        assert choice["text"] == "abca" and choice["stop_reason"] == "b"

    with_client(talk, script=byte_ids(b"abc"))


def test_a_stop_token_ends_the_answer_and_is_shown_only_when_asked() -> None:
    a, b = byte_ids(b"ab")

    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        (choice,) = await both_modes(client, prompt="x", stop_token_ids=[b], max_tokens=9)
        assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("a", "stop", b)
        (choice,) = await both_modes(
            client, prompt="x", stop_token_ids=[b], max_tokens=9, include_stop_str_in_output=True
        )
        assert choice["text"] == "ab"

    with_client(talk, script=[a, b])


def test_special_tokens_are_skipped_unless_asked_for_and_think_stays() -> None:
    script = TOKENIZER.encode("<think>a<|im_start|></think><tool_call>")

    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        (choice,) = await both_modes(client, prompt="x", max_tokens=len(script))
        assert choice["text"] == "<think>a</think><tool_call>"
        (choice,) = await both_modes(client, prompt="x", max_tokens=len(script), skip_special_tokens=False)
        assert choice["text"] == "<think>a<|im_start|></think><tool_call>"

    with_client(talk, script=script)


@pytest.mark.parametrize("group", [1, 3])
def test_an_emoji_over_four_tokens_is_never_shown_in_pieces(group: int) -> None:
    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        chunks = await events(client, prompt="x", max_tokens=9)
        assert "".join(part["text"] for chunk in chunks for part in chunk["choices"]) == "🙂é€"
        assert all("\ufffd" not in part["text"] for chunk in chunks for part in chunk["choices"])
        (choice,) = await both_modes(client, prompt="x", max_tokens=2)
        assert choice["text"] == "\ufffd"

    with_client(talk, script=byte_ids("🙂é€".encode()), group=group)


def test_an_emoji_split_between_prompt_ids_and_answer_is_whole_in_the_answer() -> None:
    smile = byte_ids("🙂".encode())

    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        body = {"prompt": [byte_ids(b"a") + smile[:2]], "max_tokens": 2}
        assert (await both_modes(client, **body))[0]["text"] == "🙂"
        assert (await both_modes(client, echo=True, **body))[0]["text"] == "a🙂"

    with_client(talk, script=smile[2:])


def test_bytes_forced_through_logit_bias_make_text() -> None:
    char = {byte: char for char, byte in byte_of_char().items()}
    token = TOKENIZER.id_of(char[0x41])

    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        (choice,) = await both_modes(client, prompt="x", max_tokens=3, logit_bias={str(token): 100}, temperature=0)
        assert choice["text"] == "AAA"

    with_client(talk)


def test_usage_comes_as_one_last_chunk_when_asked_and_not_otherwise() -> None:
    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        body = {"prompt": ["a b", "c"], "n": 2, "max_tokens": 5, "seed": 3, "ignore_eos": True}
        whole = await complete(client, **body)
        chunks = await events(client, stream_options={"include_usage": True}, **body)
        assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole["usage"]
        assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks[:-1])
        assert whole["usage"] == {"prompt_tokens": 3, "completion_tokens": 20, "total_tokens": 23}
        so_far = await events(client, stream_options={"include_usage": True, "continuous_usage_stats": True}, **body)
        counts = [chunk["usage"]["completion_tokens"] for chunk in so_far]
        assert counts == sorted(counts) and counts[0] < 20 and so_far[-1]["usage"] == whole["usage"]
        assert all(chunk["usage"]["prompt_tokens"] == 3 for chunk in so_far)
        for options in ({}, {"stream_options": {"include_usage": False}}, {"stream_options": None}):
            chunks = await events(client, **body, **options)
            assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)

    assert len(TOKENIZER.encode("a b")) == 2
    with_client(talk)


def test_n_times_prompts_is_ordered_distinct_and_repeatable() -> None:
    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        body = {"prompt": PROMPTS, "n": 3, "seed": 7, "max_tokens": 8, "logprobs": 2, "best_of": 3, "ignore_eos": True}
        choices = await both_modes(client, **body)
        assert [choice["index"] for choice in choices] == list(range(9))
        assert len({choice["text"] for choice in choices}) == 9
        for place, prompt in enumerate(PROMPTS):
            alone = await both_modes(client, **{**body, "prompt": prompt})
            for one, of_many in zip(alone, choices[3 * place :], strict=False):
                assert one == {**of_many, "index": one["index"]}

    with_client(talk)


def test_without_a_seed_each_prompt_and_each_request_draws_anew_from_the_servers_seed() -> None:
    seen: list[list[int]] = []

    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        await complete(client, prompt=["a", "a"], n=2, max_tokens=4)
        await complete(client, prompt="a", max_tokens=4)
        keys = [(request.params.seed, request.params.choice) for request in engine.seen]
        assert keys[0][0] == keys[1][0] and [key[1] for key in keys] == [0, 1, 0, 1, 0]
        assert len({key[0] for key in keys}) == 3
        seen.append([key[0] for key in keys])

    with_client(talk, info=make_info(seed=5))
    with_client(talk, info=make_info(seed=5))
    with_client(talk, info=make_info(seed=6))
    assert seen[0] == seen[1] != seen[2]


def test_max_tokens_missing_is_16_and_null_is_what_the_context_has_left() -> None:
    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        assert (await complete(client, prompt="a", ignore_eos=True))["usage"]["completion_tokens"] == 16
        assert (await complete(client, prompt="a", max_tokens=None, ignore_eos=True))["usage"]["total_tokens"] == 40
        assert (await complete(client, prompt=[[1] * 35], ignore_eos=True))["usage"]["completion_tokens"] == 5
        assert (await complete(client, prompt=[[1] * 39], max_tokens=1))["usage"]["total_tokens"] == 40

    with_client(talk, max_model_len=40)


def test_every_field_reaches_the_engine_as_asked() -> None:
    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        await complete(
            client,
            prompt="a",
            max_tokens=3,
            min_tokens=2,
            temperature=0.5,
            top_k=4,
            top_p=0.6,
            min_p=0.1,
            presence_penalty=0.2,
            frequency_penalty=-0.3,
            repetition_penalty=1.4,
            logit_bias={"5": -1, "6": 2.5},
            stop_token_ids=[9, 9, 8],
            seed=-1,
            user="someone",
            suffix=None,
            add_special_tokens=True,
        )
        params = engine.seen[0].params
        assert (params.max_tokens, params.min_tokens, params.temperature, params.top_k) == (3, 2, 0.5, 4)
        assert (params.top_p, params.min_p, params.presence_penalty) == (0.6, 0.1, 0.2)
        assert (params.frequency_penalty, params.repetition_penalty) == (-0.3, 1.4)
        assert params.logit_bias == {5: -1.0, 6: 2.5} and params.stop_token_ids == (9, 8)
        assert params.seed == 2**64 - 1 and params.eos_token_ids == EOS
        await complete(client, prompt="a", ignore_eos=True, top_k=-1)
        params = engine.seen[1].params
        assert params.eos_token_ids == () and params.top_k == 0

    with_client(talk)


@pytest.mark.parametrize(
    "fields", [{"temperature": 0, "top_p": 0}, {"top_p": 0}, {"temperature": 1e-6}, {"temperature": 0, "top_p": 0.5}]
)
def test_fields_that_leave_only_the_best_token_mean_greedy(fields: dict[str, float]) -> None:
    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        (choice,) = await both_modes(client, prompt="a", max_tokens=6, ignore_eos=True, **fields)
        (judge,) = await both_modes(client, prompt="a", max_tokens=6, **GREEDY)
        assert choice == judge and engine.seen[0].params.greedy and engine.seen[0].params.top_p == 1

    with_client(talk)


def test_nulls_mean_defaults() -> None:
    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        names = "best_of echo frequency_penalty logit_bias logprobs n presence_penalty stop stream suffix temperature"
        names += " top_p top_k min_p seed user stop_token_ids stream_options min_tokens"
        await complete(client, prompt="a", **dict.fromkeys(names.split()))
        await complete(client, prompt="a")
        first, second = (request.params for request in engine.seen)
        assert first.temperature == second.temperature == 1.0 and first.logprobs is None

    with_client(talk)


@given(
    ids=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8),
    script=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8),
    stops=st.lists(st.sampled_from(["a", "the", "\ufffd", "e", "<think>", "é", " "]), max_size=3),
    echo=st.booleans(),
    logprobs=st.one_of(st.none(), st.integers(0, 3)),
    group=st.integers(1, 4),
    skip=st.booleans(),
    include=st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_stream_and_whole_answer_are_equal_for_any_tokens_and_any_grouping(
    ids: list[int],
    script: list[int],
    stops: list[str],
    echo: bool,
    logprobs: int | None,
    group: int,
    skip: bool,
    include: bool,
) -> None:
    answers: list[Any] = []

    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        body: dict[str, Any] = {"prompt": [ids], "max_tokens": 12, "stop": stops, "echo": echo, "logprobs": logprobs}
        body |= {"skip_special_tokens": skip, "include_stop_str_in_output": include}
        answers.append(await both_modes(client, **body))

    with_client(talk, script=script, group=group)
    with_client(talk, script=script, group=1)
    assert answers[0] == answers[1]


@pytest.mark.parametrize("n", [1, 2])
def test_an_engine_fault_is_a_500_or_an_error_event_and_the_server_goes_on(n: int) -> None:
    async def talk(client: httpx.AsyncClient, engine: FakeEngine) -> None:
        body = {"prompt": "a", "n": n, "max_tokens": 5, **GREEDY}
        response = await client.post("/v1/completions", json=body)
        assert response.status_code == 500
        assert response.json()["error"] == {
            "message": "the planted fault",
            "type": "server_error",
            "param": None,
            "code": "engine_error",
        }
        chunks = await events(client, **body)
        assert chunks[-1] == response.json() and len(joined(chunks[:-1])) == n
        await complete(client, prompt="a", max_tokens=2)

    with_client(talk, fail_after=2)
