"""Prompts from a file: texts and ids, and lines that are neither."""

from __future__ import annotations

from pathlib import Path

import pytest

from rocm_serve.diagnostics.parity import prompts
from rocm_serve.errors import UserError
from rocm_serve.tokens.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(checkpoints: dict[str, Path]) -> Tokenizer:
    return Tokenizer.from_dir(checkpoints["text-bf16"])


def test_drawn_prompts_are_the_same_every_time_and_known_to_the_tokenizer(tokenizer: Tokenizer) -> None:
    one, other = prompts.drawn(tokenizer), prompts.drawn(tokenizer)
    assert one == other and [len(prompt.ids) for prompt in one] == list(prompts.LENGTHS)
    assert all(0 <= token < tokenizer.vocab_used for prompt in one for token in prompt.ids)


def test_texts_and_ids_are_read_line_by_line(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('"two words"\n\n[1, 2, 3]\n')
    assert [prompt.ids for prompt in prompts.read(path, tokenizer)] == [tuple(tokenizer.encode("two words")), (1, 2, 3)]


@pytest.mark.parametrize(
    "line",
    ["two words", "[]", '""', "[1, 1000000]", "[-1]", "{}", "[1.5]", "[true]", "[1, false]", "[null]"]
    + ["[" * 100_000, "9" * 5000, f"[{'9' * 5000}]", "NaN"],
)
def test_other_lines_are_refused_by_number(line: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f"[1]\n{line}\n")
    with pytest.raises(UserError, match="line 2: legal: a JSON text, or a JSON list of ids from 0 to"):
        prompts.read(path, tokenizer)


def test_half_a_surrogate_pair_is_no_text(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('[1]\n"\\ud800"\n')
    with pytest.raises(UserError, match="line 2: this text holds half a surrogate pair"):
        prompts.read(path, tokenizer)


def test_a_text_may_hold_other_ends_of_lines(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('"a\u2028b\x85c"\n[1]\n', encoding="utf-8")
    assert [prompt.where[-6:] for prompt in prompts.read(path, tokenizer)] == ["line 1", "line 2"]


@pytest.mark.parametrize(
    ("lengths", "new_tokens", "words"),
    [
        ((3, 20, 4), 8, "a file, line 2: 20 tokens; the model allows 20 positions, so legal: up to 19"),
        (
            (3, 12),
            9,
            "--new-tokens 9: legal: 1..8: the longest prompt has 12 tokens, and the model allows 20",
        ),
        ((3,), 0, "--new-tokens 0: legal: 1 or more"),
    ],
)
def test_what_the_model_cannot_hold_is_refused_by_line_or_by_flag(
    lengths: tuple[int, ...], new_tokens: int, words: str
) -> None:
    asked = [prompts.Prompt((1,) * length, f"a file, line {i}") for i, length in enumerate(lengths, 1)]
    with pytest.raises(UserError) as refused:
        prompts.check_lengths(asked, new_tokens, 20)
    assert str(refused.value).startswith(words)
    assert prompts.check_lengths(asked[:1], 8, 20) == 11


def test_a_file_without_prompts_and_a_missing_one_are_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(UserError, match="holds no prompt"):
        prompts.read(tmp_path / "empty", tokenizer)
    with pytest.raises(UserError, match="No such file"):
        prompts.read(tmp_path / "absent", tokenizer)
