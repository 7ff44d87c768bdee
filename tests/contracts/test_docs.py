"""What the documents name exists."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HOPS = re.findall(r"`(rocm_serve/[\w/]+\.py):([\w.]+)`", (ROOT / "docs/request_life.md").read_text(encoding="utf-8"))


def names_in(path: Path) -> set[str]:
    """List the functions, classes, and methods (as Class.method) of a file."""
    found: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = (m for m in node.body if isinstance(m, ast.FunctionDef | ast.AsyncFunctionDef))
            found |= {f"{node.name}.{m.name}" for m in methods}
    return found


@pytest.mark.parametrize(("path", "name"), HOPS)
def test_every_hop_of_a_requests_life_exists(path: str, name: str) -> None:
    assert (ROOT / path).is_file(), f"docs/request_life.md names {path}"
    assert name in names_in(ROOT / path), f"docs/request_life.md names {name} in {path}"


def test_the_life_has_hops_through_every_layer() -> None:
    packages = {path.split("/")[1] for path, _ in HOPS}
    assert {"server", "tokens", "engine", "executor", "models", "layers", "ops"} <= packages


def test_make_targets_that_the_documents_name_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][\w-]*):", makefile, re.MULTILINE))
    for document in ("README.md", "CONTRIBUTING.md", "docs/adding_an_op.md"):
        text = (ROOT / document).read_text(encoding="utf-8")
        for command in re.findall(r"(?:`|^|&& )make ((?:[a-z][\w-]* ?)+)", text, re.MULTILINE):
            for target in command.split():
                assert target in targets, f"{document} says make {target}"


def test_relative_links_of_the_documents_lead_somewhere() -> None:
    for document in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")]:
        for link in re.findall(r"\]\(([^)#]+)\)", document.read_text(encoding="utf-8")):
            if "://" not in link:
                assert (document.parent / link).exists(), f"{document.name} links to {link}"


@pytest.mark.parametrize("name", ["expert_parallel.md"])
def test_flags_that_a_page_names_exist(name: str) -> None:
    surface = json.loads((ROOT / "tests/golden/surface.json").read_text(encoding="utf-8"))
    known = {flag for options in surface["commands"].values() for flag in options}
    named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", (ROOT / "docs" / name).read_text(encoding="utf-8")))
    assert named and named <= known, sorted(named - known)


def test_ci_runs_what_the_rules_name() -> None:
    ci = (ROOT / ".ci/run").read_text(encoding="utf-8")
    assert "make check test" in ci
    assert "--allowed-skips=tests/allowed_skips.txt" in ci
    assert (ROOT / ".ci/run").stat().st_mode & 0o100
