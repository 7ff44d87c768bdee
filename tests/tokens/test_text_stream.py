from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rocm_serve.tokens.text_stream import TextOptions, TextStream
from tests.tokens.test_detokenizer import byte_ids, cut
from tests.tokens.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
ANY_ID = st.integers(0, TOKENIZER.vocab_used - 1)
LETTERS = st.lists(st.sampled_from(TOKENIZER.encode("abcdefgh the fox") + byte_ids("é🙂".encode())), max_size=30)
STOPS = st.lists(st.sampled_from(["ab", "abc", "c", "he", "the f", "🙂", "éa", "\ufffd"]), max_size=3).map(tuple)


def run(
    parts: list[list[int]], options: TextOptions, prompt: list[int] | None = None, echo: bool = False
) -> tuple[str, int, str | None, list[int]]:
    stream = TextStream(TOKENIZER, options)
    text, used, offsets, matched = "", 0, [], None
    if prompt is not None and echo:
        step = stream.echo(prompt)
        text, offsets = step.text, list(step.offsets)
    elif prompt is not None:
        stream.prime(prompt)
    for part in parts:
        step = stream.push(part)
        text, used, matched = text + step.text, used + step.used, step.matched
        offsets += step.offsets
        if matched is not None:
            break
    if matched is None:
        step = stream.finish()
        text, matched = text + step.text, step.matched
    assert stream.shown == len(text)
    return text, used, matched, offsets


@given(LETTERS, STOPS, st.lists(st.integers(0, 30), max_size=6), st.booleans(), st.integers(0, 4), st.booleans())
def test_text_count_and_offsets_do_not_depend_on_how_tokens_are_grouped(
    ids: list[int], stops: tuple[str, ...], cuts: list[int], include: bool, min_tokens: int, offsets: bool
) -> None:
    options = TextOptions(stops, include, True, min_tokens, offsets)
    assert run(cut(ids, cuts), options) == run([[token] for token in ids], options)


@given(LETTERS, STOPS)
def test_the_answer_is_the_full_decode_cut_at_the_stop(ids: list[int], stops: tuple[str, ...]) -> None:
    text, used, matched, _ = run([ids], TextOptions(stops))
    full = TOKENIZER.decode(ids, skip_special_tokens=True)
    assert full.startswith(text)
    if matched is None:
        assert text == full and used == len(ids)
    else:
        assert full[len(text) :].startswith(matched) and not any(stop in text for stop in stops)
        fewer = run([ids[: used - 1]], TextOptions(stops, track_offsets=True)) if used else None
        assert fewer is None or fewer[2] is None or "\ufffd" in stops


@given(st.lists(ANY_ID, max_size=12), st.lists(ANY_ID, max_size=12))
def test_offsets_cut_an_echoed_text_into_its_tokens(prompt: list[int], answer: list[int]) -> None:
    text, _, _, offsets = run(
        [answer], TextOptions(skip_special_tokens=False, track_offsets=True), prompt=prompt, echo=True
    )
    assert text == TOKENIZER.decode([*prompt, *answer])
    assert offsets == sorted(offsets) and len(offsets) == len(prompt) + len(answer)
    edges = [*offsets, len(text)]
    assert "".join(text[a:b] for a, b in zip(edges, edges[1:], strict=False)) == text
    for token, start in zip([*prompt, *answer], offsets, strict=True):
        name = TOKENIZER.token_string(token)
        alone_on_both_sides = all(TOKENIZER.token_string(t)[:6] != "bytes:" for t in [*prompt, *answer])
        if alone_on_both_sides:
            assert text[start:].startswith(name)


def test_a_prompt_that_ends_inside_a_character_is_continued() -> None:
    smile = byte_ids("🙂".encode())
    assert run([smile[2:]], TextOptions(), prompt=[*byte_ids(b"a"), *smile[:2]])[0] == "🙂"
    assert run([smile[2:]], TextOptions(), prompt=[*byte_ids(b"a"), *smile[:2]], echo=True)[0] == "a🙂"


def test_the_hidden_last_token_counts_but_shows_nothing() -> None:
    stream = TextStream(TOKENIZER, TextOptions(skip_special_tokens=False))
    step = stream.push(byte_ids(b"ab"), hide_last=True)
    assert (step.text, step.used) == ("a", 2)
    stream = TextStream(TOKENIZER, TextOptions(skip_special_tokens=False, track_offsets=True))
    step = stream.push(byte_ids(b"ab"), hide_last=True)
    assert (step.text, step.used, list(step.offsets)) == ("a", 2, [0, 1])


def test_a_stop_complete_within_min_tokens_does_not_count() -> None:
    ids = byte_ids(b"abab")
    assert run([ids], TextOptions(("ab",), min_tokens=1))[:3] == ("", 2, "ab")
    assert run([ids], TextOptions(("ab",), min_tokens=2))[:3] == ("ab", 4, "ab")
    assert run([ids], TextOptions(("ab",), min_tokens=4))[:3] == ("abab", 4, None)
