from __future__ import annotations

import json
import random
import sys
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as BpeTokenizer
from tokenizers import decoders, models

from rocm_serve.errors import UserError
from rocm_serve.tokens.tokenizer import LONG_TEXT_CHARS, Tokenizer, byte_of_char
from tests.tokens.tiny import PLAIN, SPECIAL, TEMPLATE, build_bpe, tiny_tokenizer, write_tokenizer

BPE = build_bpe()


def test_the_byte_alphabet_is_a_bijection_on_all_bytes() -> None:
    assert sorted(byte_of_char().values()) == list(range(256))
    assert byte_of_char()["Ġ"] == 0x20 and byte_of_char()["Ċ"] == 0x0A


@given(st.text())
def test_decode_of_encode_is_the_normalised_text(text: str) -> None:
    import unicodedata

    tokenizer = tiny_tokenizer()
    assert tokenizer.decode(tokenizer.encode(text)) == unicodedata.normalize("NFC", text)


@given(st.lists(st.integers(0, tiny_tokenizer().vocab_used - 1), max_size=30), st.booleans())
def test_decode_equals_the_tokenizers_library_on_any_ids(ids: list[int], skip: bool) -> None:
    tokenizer = tiny_tokenizer()
    assert tokenizer.decode(ids, skip) == BPE.decode(ids, skip_special_tokens=skip)


def test_special_tokens_in_text_become_their_ids_and_nothing_is_put_in_front() -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode("<|im_start|>x<think>")
    assert ids == [tokenizer.id_of("<|im_start|>"), tokenizer.id_of("x"), tokenizer.id_of("<think>")]
    assert tokenizer.encode("x", add_special_tokens=True) == tokenizer.encode("x")


def test_only_special_tokens_vanish_under_skip_special_tokens() -> None:
    tokenizer = tiny_tokenizer()
    ids = [tokenizer.id_of(token) for token in [*SPECIAL, *PLAIN]]
    assert None not in ids
    known = [token for token in ids if token is not None]
    assert tokenizer.decode(known, skip_special_tokens=True) == "".join(PLAIN)
    assert tokenizer.decode(known) == "".join([*SPECIAL, *PLAIN])
    assert tokenizer.special_ids == {tokenizer.id_of(token) for token in SPECIAL}


def test_vocab_used_is_one_past_the_last_known_id() -> None:
    tokenizer = tiny_tokenizer()
    assert tokenizer.knows(tokenizer.vocab_used - 1)
    assert not tokenizer.knows(tokenizer.vocab_used) and not tokenizer.knows(-1)
    assert tokenizer.vocab_used == BPE.get_vocab_size(with_added_tokens=True)


def test_an_id_without_a_meaning_is_a_gap() -> None:
    bpe = BpeTokenizer(models.WordLevel({"a": 0, "b": 3}, unk_token="a"))
    bpe.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer(bpe, tiny_tokenizer().files)
    assert tokenizer.has_gaps and not tiny_tokenizer().has_gaps
    assert [tokenizer.knows(i) for i in range(5)] == [True, False, False, True, False]
    assert tokenizer.decode([0, 1, 2, 3]) == "ab" and tokenizer.token_string(2) == "token_id:2"


def test_token_string_spells_partial_characters_as_bytes() -> None:
    tokenizer = tiny_tokenizer()
    alphabet = {byte: char for char, byte in byte_of_char().items()}
    lead = tokenizer.id_of(alphabet[0xF0])
    assert lead is not None and tokenizer.token_string(lead) == "bytes:\\xf0"
    assert tokenizer.token_string(tokenizer.encode(" the")[0]).startswith(" ")
    assert tokenizer.token_string(tokenizer.vocab_used) == f"token_id:{tokenizer.vocab_used}"


def test_a_model_directory_gives_tokens_and_template(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_dir(write_tokenizer(tmp_path))
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.files.bos_token is None
    assert tokenizer.files.pad_token == "<|endoftext|>" and tokenizer.chat_template == TEMPLATE
    (tmp_path / "chat_template.jinja").write_text("{{ 1 }}", encoding="utf-8")
    assert Tokenizer.from_dir(tmp_path).chat_template == "{{ 1 }}"


def test_named_templates_give_the_default_one(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["chat_template"] = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    path.write_text(json.dumps(config))
    assert Tokenizer.from_dir(tmp_path).chat_template == "d"


@pytest.mark.parametrize("content", [None, "{", "{}"])
def test_a_missing_or_broken_tokenizer_is_a_one_line_error(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(UserError, match="tokenizer.json"):
        Tokenizer.from_dir(tmp_path)


def test_a_broken_tokenizer_config_is_named(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(UserError, match="tokenizer_config.json"):
        Tokenizer.from_dir(tmp_path)


def test_other_kinds_of_tokenizer_are_refused() -> None:
    files = tiny_tokenizer().files
    bpe = BpeTokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    with pytest.raises(UserError, match="byte-level"):
        Tokenizer(bpe, files)
    bpe.decoder = decoders.WordPiece()
    with pytest.raises(UserError, match="byte-level"):
        Tokenizer(bpe, files)
    bpe.decoder = decoders.Sequence([decoders.ByteLevel()])
    assert Tokenizer(bpe, files).vocab_used == 1
    broken = BpeTokenizer(models.WordLevel({"\u4f60": 0}, unk_token="\u4f60"))
    broken.decoder = decoders.ByteLevel()
    with pytest.raises(UserError, match="byte alphabet"):
        Tokenizer(broken, files)


@pytest.mark.parametrize("add_special_tokens", [False, True])
def test_long_texts_are_tokenised_as_short_ones_are(add_special_tokens: bool) -> None:
    words = ["the", " of", " naïve", " cafe\u0301", " 🙂", "\n\n", "<think>", "<|im_end|>", " 12"]
    text = "".join(random.Random(5).choices(words, k=3 * LONG_TEXT_CHARS))
    assert len(text) > LONG_TEXT_CHARS
    expected = build_bpe().encode(text, add_special_tokens=add_special_tokens).ids
    assert tiny_tokenizer().encode(text, add_special_tokens) == expected


def test_no_text_of_so_few_tokens_is_longer_than_the_bound() -> None:
    tokenizer = tiny_tokenizer()
    longest = max((tokenizer.bytes_of([i]) for i in range(tokenizer.vocab_used)), key=len)
    assert len(longest) * 7 <= tokenizer.max_bytes(7)
    sources: dict[str, str] = {}  # the longest way to write each character that NFC keeps
    for code in range(sys.maxunicode + 1):
        if not 0xD800 <= code < 0xE000 and len(made := unicodedata.normalize("NFC", chr(code))) == 1:
            sources[made] = max(sources.get(made, ""), chr(code), key=lambda text: len(text.encode()))
    worst = 0.0
    for char in sources:
        parts = unicodedata.normalize("NFD", char)
        written = "".join(sources.get(part, part) for part in parts)
        worst = max(worst, len(written.encode()) / len(char.encode()))
    assert worst >= 3 and tokenizer.max_bytes(1) >= worst * len(longest)


@given(st.text(max_size=60), st.integers(1, 400), st.integers(1, 12))
def test_a_text_is_given_up_by_its_beginning_only_where_the_whole_is_too_long(
    part: str, times: int, limit: int
) -> None:
    tokenizer = tiny_tokenizer()
    text = part * times
    whole = tokenizer.encode(text)
    ids = tokenizer.encode_within(text, limit)
    assert ids == whole or (ids is None and len(whole) > limit)


def test_of_a_text_that_is_far_too_long_the_beginning_is_read_only(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tiny_tokenizer()
    read: list[int] = []
    encode = tokenizer.encode

    def counting(text: str, add_special_tokens: bool = False) -> list[int]:
        read.append(len(text))
        return encode(text, add_special_tokens)

    monkeypatch.setattr(tokenizer, "encode", counting)
    assert tokenizer.encode_within("many words " * 100_000, 1000) is None
    assert sum(read) <= 8 * 1000
