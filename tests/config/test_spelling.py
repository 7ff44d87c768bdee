"""Command lines of SGLang and vLLM in our words: what is the same, what has no effect, what is refused and how."""

from __future__ import annotations

import pytest

from rocm_serve.config.load import FIELDS, flag_name
from rocm_serve.config.spelling import CommandLine, in_our_words
from rocm_serve.errors import UserError

SERVE = {flag_name(name): info.type is not bool for name, info in FIELDS.items()} | {"--config": True, "--help": False}
PLAN = {"--model": True, "--tp": True, "--mem-fraction": True, "--json": False, "--gpu": True}


def translate(text: str, known: dict[str, bool] = SERVE, command: str = "serve") -> CommandLine:
    return in_our_words(text.split(), known, command)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("--model-path d --tp-size 8 --pp-size=2", "--model d --tp 8 --pp 2"),
        ("-tp 8 -pp=2 --max-num-seqs 16", "--tp 8 --pp 2 --max-running-requests 16"),
        ("--mem-fraction-static 0.95", "--mem-fraction 0.95"),
        ("--context-length 8192 --random-seed 3", "--max-model-len 8192 --seed 3"),
        ("--kv-cache-dtype fp8 --dtype bf16", "--kv-cache-dtype fp8_e4m3 --dtype bfloat16"),
        ("--disable-cuda-graph --port 1", "--enforce-eager --port 1"),
        ("--model=d --op linear=reference --op silu_mul=reference",) * 2,
        ("--config f.toml --tp-size 2", "--config f.toml --tp 2"),
        ("--help", "--help"),
        ("--unheard-of --tp-size 2", "--unheard-of --tp 2"),
        ("stray --tp-size 2", "stray --tp 2"),
        ("--max-model-len -1", "--max-model-len -1"),
        ("--model --tp-size", "--model --tp-size"),
        ("--tp 2 --tp-size 2 --tp 2", "--tp 2 --tp 2 --tp 2"),
        ("--mem-fraction 0.90 --gpu-memory-utilization 0.9", "--mem-fraction 0.90 --mem-fraction 0.9"),
    ],
)
def test_the_same_setting_under_another_name(theirs: str, ours: str) -> None:
    line = translate(theirs)
    assert " ".join(line.words).replace("--model d", "--model=d") == ours.replace("--model d", "--model=d")
    assert line.notes == []


@pytest.mark.parametrize(
    ("text", "notes"),
    [
        ("--disable-radix-cache", ["--disable-radix-cache has no effect: there is no prefix cache"]),
        ("--decode-log-interval 8", ["--decode-log-interval 8 has no effect: numbers are in /metrics"]),
        ("--decode-log-interval=8", ["--decode-log-interval 8 has no effect: numbers are in /metrics"]),
        ("-q fp8 -dp 1", ["-q fp8 has no effect: each tensor's format", "-dp 1 has no effect: there is one replica"]),
    ],
)
def test_a_flag_without_effect_is_taken_and_told(text: str, notes: list[str]) -> None:
    line = translate(f"--model d {text} --tp-size 2")
    assert line.words == ["--model", "d", "--tp", "2"]
    assert [note.startswith(start) for note, start in zip(line.notes, notes, strict=True)] == [True] * len(notes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--tp-size 8 --tensor-parallel-size 4", "--tp-size 8 and --tensor-parallel-size 4 are one setting, --tp;"),
        ("--tp 8 --tp-size 4", "--tp 8 and --tp-size 4 are one setting, --tp;"),
        ("--tp 8 --tp-size 8 --tp 2", "--tp-size 8 and --tp 2 are one setting"),
        ("--tp-size two", "command line: --tp-size 'two': legal: a whole number"),
        ("--mem-fraction-static most", "--mem-fraction-static 'most': legal: a number"),
        ("--tp-size", "--tp-size needs a value"),
        ("--cuda-graph-max-bs", "--cuda-graph-max-bs needs a value"),
        ("--disable-radix-cache=1", "--disable-radix-cache takes no value"),
        ("--disable-cuda-graph=1", "--disable-cuda-graph takes no value"),
        ("--quantization awq", "--quantization awq: each tensor's format is read from the checkpoint; legal: fp8"),
        ("-dp 2", "-dp 2: there is one replica; legal: 1"),
        ("--api-key s", "--api-key is refused: there is no authentication; put a proxy"),
        ("--tokenizer-path=d", "--tokenizer-path is refused: the tokenizer is read from the folder of --model"),
        ("--speculative-token-map x", "--speculative-token-map is refused: drafting is --speculative mtp"),
        ("--enable-prefix-caching", "--enable-prefix-caching is refused: there is no prefix cache"),
    ],
)
def test_what_cannot_be_is_refused_in_the_users_words(text: str, message: str) -> None:
    with pytest.raises(UserError) as refused:
        translate(f"--model d {text}")
    assert str(refused.value).startswith(message) or message in str(refused.value)


def test_the_same_spelling_given_again_wins_as_everywhere() -> None:
    assert translate("--tp-size 8 --tp-size 4").words == ["--tp", "8", "--tp", "4"]


def test_flags_that_mean_nothing_to_a_command_are_named() -> None:
    line = translate(
        "--json --tp-size 2 --port 9001 --host 0.0.0.0 --watchdog-timeout=5 --enforce-eager --gpu h200", PLAN, "plan"
    )
    assert line.words == ["--json", "--tp", "2", "--gpu", "h200"]
    assert line.notes == ["no meaning for `plan`: --port, --host, --watchdog-timeout, --enforce-eager"]
    with pytest.raises(UserError, match="--port 'abc'"):
        translate("--port abc", PLAN, "plan")


def test_an_error_about_our_flag_names_the_users_too() -> None:
    line = translate("--tp-size 3 --pp 2")
    assert line.in_their_words("--tp 3: legal: 1, 2") == "--tp 3: legal: 1, 2 (--tp is your --tp-size)"
    assert line.in_their_words("--pp 2 is wrong") == "--pp 2 is wrong"
    assert line.in_their_words("--tp-something") == "--tp-something"
