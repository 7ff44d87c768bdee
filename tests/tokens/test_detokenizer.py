from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rocm_serve.tokens.detokenizer import Detokenizer
from rocm_serve.tokens.tokenizer import byte_of_char
from tests.tokens.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
CHAR_OF_BYTE = {byte: char for char, byte in byte_of_char().items()}
ANY_ID = st.integers(0, TOKENIZER.vocab_used - 1)


def byte_ids(data: bytes) -> list[int]:
    ids = [TOKENIZER.id_of(CHAR_OF_BYTE[byte]) for byte in data]
    return [token for token in ids if token is not None]


def cut(ids: list[int], cuts: list[int]) -> list[list[int]]:
    places = sorted({0, len(ids), *(place % (len(ids) + 1) for place in cuts)})
    return [ids[a:b] for a, b in zip(places, places[1:], strict=False)]


@given(st.lists(ANY_ID, max_size=40), st.lists(st.integers(0, 40), max_size=6), st.booleans())
def test_deltas_and_flush_join_to_the_full_decode_for_any_ids_and_cuts(
    ids: list[int], cuts: list[int], skip: bool
) -> None:
    detokenizer = Detokenizer(TOKENIZER, skip_special_tokens=skip)
    text = "".join(detokenizer.feed(part) for part in cut(ids, cuts)) + detokenizer.flush()
    assert text == TOKENIZER.decode(ids, skip)


@given(st.text(max_size=30))
def test_valid_text_fed_byte_by_byte_never_shows_a_replacement_character(text: str) -> None:
    detokenizer = Detokenizer(TOKENIZER, skip_special_tokens=True)
    shown = ""
    for token in byte_ids(text.encode()):
        shown += detokenizer.feed([token])
        assert text.startswith(shown)
    assert shown == text and detokenizer.flush() == ""


def test_an_emoji_over_four_tokens_comes_out_with_its_last_byte() -> None:
    detokenizer = Detokenizer(TOKENIZER, skip_special_tokens=True)
    assert [detokenizer.feed([token]) for token in byte_ids("🙂".encode())] == ["", "", "", "🙂"]


def test_an_unfinished_character_is_flushed_once() -> None:
    detokenizer = Detokenizer(TOKENIZER, skip_special_tokens=True)
    assert detokenizer.feed(byte_ids("a🙂".encode()[:-1])) == "a"
    assert detokenizer.flush() == "\ufffd" and detokenizer.flush() == ""


@given(st.lists(ANY_ID, max_size=12), st.lists(ANY_ID, max_size=12))
def test_a_primed_detokenizer_continues_the_prompts_text(prompt: list[int], answer: list[int]) -> None:
    whole = Detokenizer(TOKENIZER, skip_special_tokens=False)
    shown_by_prompt = whole.feed(prompt)
    primed = Detokenizer(TOKENIZER, skip_special_tokens=False)
    primed.prime(prompt)
    assert shown_by_prompt + primed.feed(answer) + primed.flush() == TOKENIZER.decode([*prompt, *answer])


@given(st.binary(max_size=9), st.binary(max_size=5))
def test_priming_finds_the_unfinished_end_of_any_bytes(head: bytes, rest: bytes) -> None:
    whole = Detokenizer(TOKENIZER, skip_special_tokens=True)
    whole.feed(byte_ids(head))
    primed = Detokenizer(TOKENIZER, skip_special_tokens=True)
    primed.prime(byte_ids(head))
    assert whole.feed(byte_ids(rest)) + whole.flush() == primed.feed(byte_ids(rest)) + primed.flush()
