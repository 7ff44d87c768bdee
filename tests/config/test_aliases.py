"""The tables of other servers' flags: they agree with each other, with our keys, and with what users read.

The tables of docs/coming_from.md are made by `python -m tests.config.test_aliases`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from rocm_serve.config import aliases
from rocm_serve.config.load import FIELDS, choices, flag_name

PAGE = Path(__file__).parents[2] / "docs" / "coming_from.md"
BEGIN = "<!-- tables -->"
REFERENCE_LAUNCH = (
    "--model-path --tp-size --pp-size --nnodes --node-rank --dist-init-addr --dist-timeout --attention-backend"
    " --chunked-prefill-size --watchdog-timeout --mem-fraction-static --host --port --disable-radix-cache"
    " --disable-custom-all-reduce --page-size --kv-cache-dtype --cuda-graph-max-bs --max-running-requests"
    " --reasoning-parser --tool-call-parser"
)


def tables() -> Iterator[str]:
    """Write the tables of docs/coming_from.md, line by line."""
    yield from ("| here | there |", "|---|---|")
    for field in FIELDS:
        if aliases.others(field):
            yield f"| `{flag_name(field)}` | {', '.join(f'`{flag}`' for flag in aliases.others(field))} |"
    yield from ("", "| value of | here | there |", "|---|---|---|")
    for field, words in aliases.WORDS.items():
        for theirs, here in words.items():
            yield f"| `{flag_name(field)}` | `{here}` | `{theirs}` |"
    for flag, (field, here) in aliases.SETTINGS.items():
        yield f"| `{flag_name(field)}` | `{here}` | the switch `{flag}` |"
    yield from ("", "| taken, without effect | because |", "|---|---|")
    for flag, entry in aliases.NO_EFFECT.items():
        value = " N" if entry.takes == () else f" {'/'.join(entry.takes)}" if entry.takes else ""
        yield f"| `{flag}{value}` | {entry.because} |"
    yield from ("", "| refused | because; what to do instead |", "|---|---|")
    for flag, why in (aliases.REFUSED | {f"{begin}*": why for begin, why in aliases.REFUSED_FAMILIES.items()}).items():
        yield f"| `{flag}` | {why} |"
    short = ", ".join(f"`{other}` for `{flag}`" for other, flag in aliases.SHORT.items())
    yield from ("", f"More names for these: {short}.", "")
    yield from ("| variable, not read | instead |", "|---|---|")
    yield from (f"| `{name}` | {why} |" for name, why in aliases.VARIABLES.items())


def test_what_users_read_is_what_the_tables_say() -> None:
    _, begin, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN + "\n")
    assert begin and rest == "\n".join(tables()) + "\n", "if meant: python -m tests.config.test_aliases"


def test_every_spelling_stands_for_one_of_our_keys_and_no_flag_is_told_twice() -> None:
    assert set(aliases.SPELLINGS.values()) | set(aliases.SWITCHES.values()) <= set(FIELDS)
    assert all(here in choices(field) for field, here in aliases.SETTINGS.values())
    theirs = (aliases.SPELLINGS, aliases.SWITCHES, aliases.SETTINGS, aliases.NO_EFFECT, aliases.REFUSED, aliases.SHORT)
    told = [flag for table in theirs for flag in table]
    assert len(set(told)) == len(told)
    assert not set(told) & {flag_name(field) for field in FIELDS}
    for flag in (*aliases.SPELLINGS, *aliases.SWITCHES, *aliases.SETTINGS, *aliases.NO_EFFECT):
        assert aliases.refusal(flag) is None, flag


def test_words_of_others_stand_for_legal_values_and_hide_none() -> None:
    for field, words in aliases.WORDS.items():
        assert set(words.values()) <= set(choices(field))
        assert not set(words) & set(choices(field))


def test_short_names_lead_to_the_tables() -> None:
    assert all(flag in aliases.NO_EFFECT or flag in aliases.REFUSED for flag in aliases.SHORT.values())


def test_every_flag_of_the_reference_launch_is_known() -> None:
    known = {flag_name(field) for field in FIELDS} | set(aliases.SPELLINGS) | set(aliases.NO_EFFECT)
    known |= set(aliases.SETTINGS)
    assert set(REFERENCE_LAUNCH.split()) <= known
    for place in (PAGE, PAGE.parents[1] / "evals" / "reference.py"):
        assert set(REFERENCE_LAUNCH.split()) <= set(re.findall(r"--[\w-]+", place.read_text(encoding="utf-8"))), place


def test_help_lists_the_other_names_of_a_key() -> None:
    assert aliases.others("tp") == ("--tp-size", "--tensor-parallel-size", "-tp")
    assert aliases.others("enforce_eager") == ("--disable-cuda-graph",)
    assert aliases.others("port") == ()


@pytest.mark.parametrize(
    ("name", "ours"),
    [("tp_size", "tp"), ("mem_fraction_static", "mem_fraction"), ("disable_cuda_graph", "enforce_eager"), ("x", None)],
)
def test_a_foreign_key_has_a_name_here(name: str, ours: str | None) -> None:
    assert aliases.ours(name) == ours


def test_only_variables_that_are_set_are_named() -> None:
    assert aliases.foreign_variables({"NCCL_IB_HCA": "x", "ROCM_SERVE_TP": "2", "PATH": "/bin"}) == []
    lines = aliases.foreign_variables({"VLLM_UNHEARD": "1", "SGLANG_USE_AITER": "1", "SGLANG_X": "", "A": "b"})
    assert lines == [
        "SGLANG_USE_AITER is not read here: --attention-backend aiter, or --op OP=aiter, asks for AITER's kernels",
        "not read here, and nothing stands for it: SGLANG_X, VLLM_UNHEARD",
    ]


if __name__ == "__main__":
    head = PAGE.read_text(encoding="utf-8").partition(BEGIN)[0]
    PAGE.write_text("\n".join([head + BEGIN, *tables()]) + "\n", encoding="utf-8")
