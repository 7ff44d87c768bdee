"""Conformance probes against a real server: one process of a tiny text model for all but the pipeline-parallel one.

What an evaluation harness and OpenAI clients rely on: scoring by echo, stop strings, characters over token borders,
refusals that leave the server as it was, answers that do not depend on batch mates.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from rocm_serve.tokens.tokenizer import Tokenizer, byte_of_char
from tests.e2e import hf
from tests.e2e.harness import Server
from tests.e2e.talk import all_at_once, both_modes, events, refused, streamed, whole
from tests.server.http import Json, joined

LAYOUT = "text-bf16"
LIMIT = 256
PROMPTS = ["The quick brown fox jumps", "naïve café 🙂", "Question: how many eggs are left in the basket?"]
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
GOOD: dict[str, Any] = {"prompt": "Hello", "max_tokens": 3, "logprobs": 1, **GREEDY}
SMILE = "🙂".encode()
DRAW: dict[str, Any] = {"prompt": PROMPTS[0], "seed": 77, "max_tokens": 12, "logprobs": 3, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ["--max-model-len", str(LIMIT), "--max-running-requests", "48"]
    with Server(checkpoints[LAYOUT], tmp_path_factory.mktemp("probes"), flags) as server:
        yield server


@pytest.fixture(scope="module")
def tokenizer(checkpoints: dict[str, Path]) -> Tokenizer:
    return Tokenizer.from_dir(checkpoints[LAYOUT])


@pytest.fixture(scope="module")
def byte_ids(tokenizer: Tokenizer) -> list[int]:
    """The id of the token of each byte."""
    char_of = {byte: char for char, byte in byte_of_char().items()}
    ids = [tokenizer.id_of(char_of[byte]) for byte in range(256)]
    assert None not in ids
    return [token for token in ids if token is not None]


@pytest.fixture(scope="module")
def good(server: Server) -> Json:
    """The answer to GOOD before anything bad was sent."""
    return whole(server, **GOOD)[0]


def vocab_size(tokenizer: Tokenizer) -> int:
    return len(tokenizer.pieces(False))


# R1, R2: scoring a prompt


@pytest.fixture(scope="module")
def reference(checkpoints: dict[str, Path]) -> hf.Reference:
    return hf.load(checkpoints[LAYOUT])


def check_scores(choice: Json, ids: Sequence[int], row_of: torch.Tensor, used: int) -> None:
    """One entry per id; None first; HF's log-probs and arg max; offsets cut the text without a gap."""
    lists = choice["logprobs"]
    assert {len(values) for values in lists.values()} == {len(ids)}
    assert lists["token_logprobs"][0] is None and lists["top_logprobs"][0] is None
    for place in range(1, len(ids)):
        row, own, top = row_of[place - 1], lists["token_logprobs"][place], lists["top_logprobs"][place]
        assert own == pytest.approx(row[ids[place]].item(), abs=1e-4)
        assert max(top.values()) == pytest.approx(row[:used].max().item(), abs=1e-4)
        assert top[lists["tokens"][place]] == own
    edges = [*lists["text_offset"], len(choice["text"])]
    assert edges == sorted(edges)
    assert "".join(choice["text"][a:b] for a, b in zip(edges, edges[1:], strict=False)) == choice["text"]


@pytest.mark.parametrize("as_ids", [False, True])
def test_r1_echo_scores_every_prompt_of_a_batch_and_one_made_token(
    server: Server, tokenizer: Tokenizer, reference: hf.Reference, as_ids: bool
) -> None:
    ids = [tokenizer.encode(text) for text in PROMPTS]
    assert len({len(prompt) for prompt in ids}) == 3 and ids == [
        server.post("/tokenize", {"prompt": text})["tokens"] for text in PROMPTS
    ]
    choices = both_modes(
        server, prompt=ids if as_ids else PROMPTS, echo=True, logprobs=1, max_tokens=1, temperature=0, seed=1234
    )
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    for text, prompt, choice in zip(PROMPTS, ids, choices, strict=True):
        assert reference.router_gap(prompt) > hf.NEAR_TIE, "two right answers would differ: choose another text"
        rows = reference.one_shot(prompt)
        made = int(rows[-1, : reference.vocab_used].argmax())
        assert choice["text"].startswith(text) and choice["text"] == tokenizer.decode([*prompt, made])
        check_scores(choice, [*prompt, made], rows, reference.vocab_used)


def test_r1_a_greedy_answer_is_greedy_when_it_is_scored(server: Server, tokenizer: Tokenizer) -> None:
    """What a log-likelihood task asks: is the continuation the arg max at each place?"""
    (choice,) = whole(server, prompt=PROMPTS[0], max_tokens=8, logprobs=0, return_tokens_as_token_ids=True, **GREEDY)
    made = [int(name.removeprefix("token_id:")) for name in choice["logprobs"]["tokens"]]
    prompt = tokenizer.encode(PROMPTS[0])
    (scored,) = both_modes(server, prompt=[prompt + made], echo=True, logprobs=1, max_tokens=1, temperature=0)
    lists = scored["logprobs"]
    for place, logprob in enumerate(choice["logprobs"]["token_logprobs"], start=len(prompt)):
        assert lists["token_logprobs"][place] == max(lists["top_logprobs"][place].values())
        assert lists["token_logprobs"][place] == pytest.approx(logprob, abs=1e-4)


def test_r1_one_entry_is_made_even_if_it_is_eos(server: Server, tokenizer: Tokenizer) -> None:
    eos = tokenizer.id_of("<|im_end|>")
    body = {"prompt": PROMPTS[0], "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
    (choice,) = both_modes(server, logit_bias={str(eos): 100}, **body)
    assert choice["text"] == PROMPTS[0] and choice["finish_reason"] == "stop"
    assert len(choice["logprobs"]["tokens"]) == len(tokenizer.encode(PROMPTS[0])) + 1
    assert choice["logprobs"]["tokens"][-1] == "<|im_end|>"


def test_r2_max_tokens_zero_scores_with_echo_and_is_refused_without(server: Server) -> None:
    body = {"prompt": PROMPTS[1], "max_tokens": 0}
    (one_made,) = whole(server, echo=True, logprobs=1, temperature=0, prompt=PROMPTS[1], max_tokens=1)
    (choice,) = both_modes(server, echo=True, logprobs=1, **body)
    assert (choice["text"], choice["finish_reason"]) == (PROMPTS[1], "length")
    assert choice["logprobs"]["token_logprobs"] == one_made["logprobs"]["token_logprobs"][:-1]
    assert refused(server, 400, **body)["param"] == "max_tokens"


# R3, R4: text


@pytest.fixture(scope="module")
def plain(server: Server, tokenizer: Tokenizer) -> tuple[dict[str, Any], str, list[str]]:
    """A greedy request that is kept to words of ASCII letters, its text, and the text of each token."""
    texts = {token: tokenizer.decode([token]) for token in range(vocab_size(tokenizer))}
    words = [token for token, text in texts.items() if len(text) > 2 and text.isascii() and text.strip().isalpha()]
    bias = {str(token): 50 for token in words}
    body = {"prompt": PROMPTS[0], "max_tokens": 12, "logit_bias": bias, "frequency_penalty": 2.0, **GREEDY}
    (choice,) = both_modes(server, logprobs=0, **body)
    edges = [*choice["logprobs"]["text_offset"], len(choice["text"])]
    parts = [choice["text"][a:b] for a, b in zip(edges, edges[1:], strict=False)]
    assert len(parts) == 12 and all(len(part) > 2 for part in parts), "the bias leaves words only"
    return body, choice["text"], parts


def test_r3_a_stop_over_two_tokens_leaks_no_byte(server: Server, plain: tuple[dict[str, Any], str, list[str]]) -> None:
    body, text, parts = plain
    stop = parts[4][-2:] + parts[5][:1]
    cut = text[: text.index(stop)]
    longer, never = stop + parts[5][1:2], stop + "\n\n"
    stops = [stop, [stop], [longer, stop], [stop, longer], [never, stop]]
    with ThreadPoolExecutor(8) as pool:
        shown = pool.submit(both_modes, server, stop=stop, include_stop_str_in_output=True, **body)
        not_met = pool.submit(both_modes, server, stop=never, **body)
        answers = list(pool.map(lambda wish: both_modes(server, stop=wish, **body), stops))
    for wish, (choice,) in zip(stops, answers, strict=True):
        assert (choice["text"], choice["finish_reason"]) == (cut, "stop"), wish
        assert choice["stop_reason"] == stop, "the stop that is complete first"
    assert shown.result()[0]["text"] == cut + stop
    (choice,) = not_met.result()
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (text, "length", None)


def test_r3_a_stopped_answer_ends_with_the_token_that_completes_the_stop(
    server: Server, plain: tuple[dict[str, Any], str, list[str]]
) -> None:
    body, text, parts = plain
    stop = parts[6][-1:] + parts[7][:2]
    end = text.index(stop) + len(stop)
    used = next(count for count in range(len(parts)) if len("".join(parts[:count])) >= end)
    answer = server.complete(stop=stop, logprobs=0, **body)
    assert answer["usage"]["completion_tokens"] == used < 12
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == used


def test_r4_an_emoji_over_four_tokens_is_never_shown_in_pieces(server: Server, byte_ids: list[int]) -> None:
    # A byte that is out is divided by ten: the next lower bias wins.
    bias = {str(byte_ids[byte]): value for byte, value in zip(SMILE, (100, 80, 60, 40), strict=True)}
    body: dict[str, Any] = {"prompt": "x", "logit_bias": bias, "repetition_penalty": 10.0, **GREEDY}
    chunks = events(server, max_tokens=4, **body)
    texts = [part["text"] for chunk in chunks for part in chunk["choices"]]
    assert "".join(texts) == "🙂" and not any("\ufffd" in text for text in texts)
    (choice,) = both_modes(server, max_tokens=4, **body)
    assert choice["text"] == "🙂"
    (choice,) = both_modes(server, max_tokens=3, **body)
    assert choice["text"] == "\ufffd", "what never became a character is shown once, at the end"


def test_r4_an_emoji_begun_in_the_prompt_is_whole_in_the_answer(server: Server, byte_ids: list[int]) -> None:
    smile = [byte_ids[byte] for byte in SMILE]
    body: dict[str, Any] = {"max_tokens": 2, "logit_bias": {str(smile[2]): 100, str(smile[3]): 80}}
    body |= {"prompt": [[byte_ids[ord("a")], *smile[:2]]], "repetition_penalty": 10.0, **GREEDY}
    assert both_modes(server, **body)[0]["text"] == "🙂"
    assert both_modes(server, echo=True, **body)[0]["text"] == "a🙂"


# R5, R6, R10, R16: what is malformed is refused by name and changes nothing


def test_r5_ids_and_numbers_out_of_range_are_refused_by_name(server: Server, tokenizer: Tokenizer, good: Json) -> None:
    vocab = vocab_size(tokenizer)
    bad: list[tuple[str, object]] = [
        *(("logit_bias", {key: 1}) for key in (str(vocab), "-1", "AI", "1.5", str(10**30))),
        *(("logit_bias", {"5": value}) for value in (1e30, float("nan"), float("-inf"), None, "1")),
        *(("stop_token_ids", value) for value in ([None, 10**9], [10**9], [vocab], [-1], ["a"])),
    ]
    for name, value in bad:
        error = refused(server, 400, prompt="a", **{name: value})
        assert error["param"] == name and error["type"] == "invalid_request_error"
    assert whole(server, **GOOD) == [good]


def test_r6_prompts_of_nothing_are_refused(server: Server, good: Json) -> None:
    for prompt in ("", [], [""], [[]], None, "\u0000", "\ud83d", ["ok", ""], [[1], []], ["a", None]):
        assert refused(server, 400, prompt=prompt)["param"] == "prompt"
    assert refused(server, 400)["param"] == "prompt"
    assert whole(server, **GOOD) == [good]


def test_r10_every_refusal_has_the_nested_shape_streaming_or_not(server: Server, good: Json) -> None:
    assert refused(server, 400, prompt="a", temperature=3)["param"] == "temperature"
    assert refused(server, 400, prompt="a", no_such_field=1)["param"] == "no_such_field"
    assert refused(server, 400, prompt="a", max_tokens=LIMIT + 1)["code"] == "context_length_exceeded"
    assert refused(server, 404, prompt="a", model="other")["code"] == "model_not_found"
    assert refused(server, 400, prompt="a", stream="yes")["param"] == "stream"
    assert whole(server, **GOOD) == [good]


def test_r16_lists_answer_in_order_and_a_bad_id_is_refused(server: Server, tokenizer: Tokenizer, good: Json) -> None:
    texts = ["Hello", *PROMPTS]
    ids = [tokenizer.encode(text) for text in texts]
    of_texts, of_ids, mixed = (
        both_modes(server, **(GOOD | {"prompt": prompt})) for prompt in (texts, ids, [texts[0], *ids[1:]])
    )
    assert of_texts == of_ids == mixed and [choice["index"] for choice in of_ids] == [0, 1, 2, 3]
    assert of_ids[0] == good and len({choice["text"] for choice in of_ids}) == 4
    assert both_modes(server, **(GOOD | {"prompt": ids[0]})) == [good]
    vocab = vocab_size(tokenizer)
    for prompt in ([1, vocab], [[1], [2, -1]], [10**30], [1.0], [True], [[1], 2], ["a", 1]):
        assert refused(server, 400, prompt=prompt)["param"] == "prompt"
    (last,) = whole(server, **(GOOD | {"prompt": [vocab - 1]}))
    assert last["text"]
    assert whole(server, **GOOD) == [good]


# R7, R15: random numbers


def neighbours(count: int) -> list[dict[str, Any]]:
    """Unseeded requests of all kinds, their order shuffled."""
    rng = random.Random(count)
    made = [
        {
            "prompt": [[rng.randrange(500) for _ in range(rng.choice([1, 5, 40, 70]))]],
            "max_tokens": rng.randint(6, 12),
            "temperature": rng.choice([0, 0.7, 1.3]),
            "top_k": rng.choice([0, 20]),
            "logprobs": rng.choice([None, 2]),
            "ignore_eos": True,
        }
        for _ in range(count)
    ]
    rng.shuffle(made)
    return made


def among(server: Server, count: int) -> Json:
    """Return the choice of DRAW, sent at a random place among `count` neighbours."""
    bodies = neighbours(count)
    place = random.Random(-count).randint(0, count)
    with ThreadPoolExecutor(count + 1) as pool, server.held():
        answers = [pool.submit(server.complete, **body) for body in (*bodies[:place], DRAW, *bodies[place:])]
        server.await_clients(count + 1)
    assert all(answer.result()["usage"]["completion_tokens"] >= 6 for answer in answers)
    choice: Json = answers[place].result()["choices"][0]
    return choice


@pytest.mark.multirank
@pytest.mark.timeout(600)
def test_r7_a_seeded_answer_depends_on_neither_batch_mates_nor_pipeline_stages(
    server: Server, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    (alone,) = both_modes(server, **DRAW)
    assert whole(server, **(DRAW | {"seed": 78})) != [alone], "the seed decides"
    for count in (1, 7, 31):
        assert json.dumps(among(server, count)) == json.dumps(alone), f"{count} neighbours"
    assert server.metrics()["rocm_serve_peak_running"] >= 16
    flags = ["--pp", "2", "--max-model-len", str(LIMIT), "--max-running-requests", "48"]
    with Server(checkpoints[LAYOUT], tmp_path, flags) as staged:
        assert both_modes(staged, **DRAW) == [alone]
        assert json.dumps(among(staged, 7)) == json.dumps(alone)


def test_r15_n_choices_are_ordered_distinct_and_repeatable(server: Server) -> None:
    body = DRAW | {"prompt": PROMPTS[:2], "n": 3, "max_tokens": 8}
    choices = both_modes(server, **body)
    assert [choice["index"] for choice in choices] == list(range(6))
    assert len({choice["text"] for choice in choices}) == 6
    alone = whole(server, **(body | {"prompt": PROMPTS[1], "n": 2}))
    assert alone == [choice | {"index": place} for place, choice in enumerate(choices[3:5])]
    for choice in choices:
        lists = choice["logprobs"]
        assert len(lists["tokens"]) == 8 and all(len(top) in (3, 4) for top in lists["top_logprobs"])


# R9, R11, R14: counting and limits


def test_r9_usage_comes_once_when_asked_and_not_otherwise(server: Server, tokenizer: Tokenizer) -> None:
    body = {"prompt": ["Hello", PROMPTS[0]], "n": 2, "max_tokens": 4, "seed": 3, "ignore_eos": True}
    prompt_tokens = sum(len(tokenizer.encode(text)) for text in ("Hello", PROMPTS[0]))
    with ThreadPoolExecutor(2) as pool:
        asked = pool.submit(events, server, stream_options={"include_usage": True}, **body)
        not_asked = pool.submit(events, server, stream_options={"include_usage": False}, **body)
        answer = server.complete(**body)
    assert answer["usage"] == {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": 16,
        "total_tokens": prompt_tokens + 16,
    }
    *chunks, last = asked.result()
    assert last["choices"] == [] and last["usage"] == answer["usage"]
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)
    assert all("usage" not in chunk and chunk["choices"] for chunk in not_asked.result())
    assert joined(chunks) == joined(not_asked.result()) == answer["choices"]


def test_r11_the_context_is_served_to_its_last_token_and_never_cut(server: Server) -> None:
    ids = [7 * place % 1000 for place in range(LIMIT + 1)]
    body: dict[str, Any] = {"temperature": 0, "echo": True, "logprobs": 0}
    for prompt, max_tokens, param in [
        (ids[:LIMIT], 1, "prompt"),
        (ids[: LIMIT + 1], 1, "prompt"),
        (ids[: LIMIT - 4], 5, "max_tokens"),
    ]:
        error = refused(server, 400, prompt=[prompt], max_tokens=max_tokens, **body)
        assert (error["code"], error["param"]) == ("context_length_exceeded", param)
        assert str(LIMIT) in error["message"] and str(len(prompt)) in error["message"]
    error = refused(server, 400, prompt="many words " * LIMIT, max_tokens=1)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    answer = server.complete(prompt=[ids[: LIMIT - 1]], max_tokens=1, return_tokens_as_token_ids=True, **body)
    tokens = answer["choices"][0]["logprobs"]["tokens"]
    assert tokens[:-1] == [f"token_id:{token}" for token in ids[: LIMIT - 1]]
    assert answer["usage"] == {"prompt_tokens": LIMIT - 1, "completion_tokens": 1, "total_tokens": LIMIT}


def test_r14_max_tokens_null_missing_and_huge(server: Server) -> None:
    prompt = [[7 * place % 1000 for place in range(LIMIT - 6)]]
    full: dict[str, Any] = {"prompt": prompt, **GREEDY}
    wishes = [full | {"max_tokens": None}, full, {"prompt": "a", "ignore_eos": True}]
    with ThreadPoolExecutor(1) as pool:
        stream = pool.submit(streamed, server, **wishes[0])
        for answer, made in zip(all_at_once(server, wishes), (6, 6, 16), strict=True):
            assert answer.result()["usage"]["completion_tokens"] == made
            assert answer.result()["choices"][0]["finish_reason"] == "length"
    assert stream.result()[0]["finish_reason"] == "length"
    for huge in (7, 10**9, 10**30):
        assert refused(server, 400, prompt=prompt, max_tokens=huge)["param"] == "max_tokens"


def test_r14_temperature_zero_with_top_p_zero_is_greedy(server: Server) -> None:
    body: dict[str, Any] = {"prompt": PROMPTS[2], "max_tokens": 6, "logprobs": 1, "ignore_eos": True}
    greedy = both_modes(server, temperature=0, **body)
    assert whole(server, temperature=0, top_p=0, **body) == greedy == whole(server, top_p=0, seed=1, **body)
