"""docs/bringup.md quotes the product: each quoted message is really printed somewhere, each command really exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest
import typer.main

from rocm_serve.cli import app

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "bringup.md").read_text(encoding="utf-8")
# What other programs print.
FOREIGN = ("Using network Socket", "NCCL_NET", "ibv_modify_qp")
HOLE = "\0"


@cache
def messages() -> str:
    """Every text in our sources; the parts of an f-string that are filled in are holes."""
    found = []
    sources = [*ROOT.glob("rocm_serve/**/*.py"), ROOT / "launch" / "image_check.py", ROOT / "tests" / "gpu_report.py"]
    for path in sources:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else HOLE for part in node.values)
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return "\n".join(found)


def quotes() -> list[str]:
    """The code spans of the first column of every table headed `it says`."""
    found = []
    for table in re.findall(r"^\| it says \|.*?\n\n", TEXT, re.MULTILINE | re.DOTALL):
        for row in table.strip().splitlines()[2:]:
            found += re.findall(r"`([^`]+)`", row.split("|")[1])
    return [q for q in found if not any(word in q for word in FOREIGN)]


@pytest.mark.parametrize("quote", quotes())
def test_a_quoted_message_is_one_of_ours(quote: str) -> None:
    pieces = [re.escape(piece.strip()) for piece in quote.split("…") if len(piece.strip(" /:;,")) > 2]
    assert pieces, quote
    # Values fill the holes; the words between them stand in one message, in this order.
    assert re.search("[^\n]*".join(pieces), messages()), f"nothing prints {quote!r}"


def test_the_document_quotes_enough_to_be_worth_checking() -> None:
    assert len(quotes()) >= 20


def test_every_command_and_flag_in_it_exists() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for name, rest in re.findall(r"^rocm-serve (\S+)((?:.*\\\n)*.*)$", TEXT, re.MULTILINE):
        known = {flag for param in commands[name].params for flag in param.opts}
        used = set(re.findall(r"(--[\w-]+)", rest.split("#")[0]))
        assert used <= known, f"rocm-serve {name}: {used - known}"
    for target in re.findall(r"^make (\S+)", TEXT, re.MULTILINE):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
