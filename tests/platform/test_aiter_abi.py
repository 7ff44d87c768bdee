"""Finding AITER and reading its parameters: nothing of it is imported, and what is not AMD's is named."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rocm_serve.platform import aiter_abi
from rocm_serve.platform.aiter_abi import NEEDS, Need, definitions, find_aiter, lacks, refusal
from tests.ops.aiter_standin.package import releases, write_package

Write = Callable[[dict[str, str]], Path]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the import path, before all others."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.fixture
def write(site: Path) -> Write:
    """Return a function that writes files below the folder."""

    def files(contents: dict[str, str]) -> Path:
        for name, text in contents.items():
            (site / name).parent.mkdir(parents=True, exist_ok=True)
            (site / name).write_text(text, encoding="utf-8")
        return site

    return files


def test_without_a_package_it_is_said_where_one_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    folder, why = find_aiter()
    assert folder is None
    assert why.startswith("is not installed; install AMD's AITER v0.1.17 or newer") and "`pip install aiter`" in why


def test_the_registrys_package_of_that_name_is_recognised(write: Write) -> None:
    site = write({"aiter/__init__.py": "raise SystemExit('imported')", "aiter/iter_to_aiter.py": ""})
    folder, why = find_aiter()
    assert folder is None
    assert f"in {site / 'aiter'} is the registry's package for asynchronous iterators: uninstall it" in why


def test_any_other_package_of_that_name_is_not_taken_for_it(write: Write) -> None:
    write({"aiter/__init__.py": ""})
    assert "is not AMD's: it has no jit/core.py" in find_aiter()[1]


def test_one_file_and_a_folder_that_is_no_package_are_named(write: Write, site: Path) -> None:
    write({"aiter/README.md": "a checkout, seen from the folder above it"})
    assert f"is no package here but {site / 'aiter'}" in find_aiter()[1]


def test_a_single_module_is_named(write: Write) -> None:
    write({"aiter.py": ""})
    assert "is no package here but one file" in find_aiter()[1]


@pytest.mark.parametrize("op", NEEDS)
@pytest.mark.parametrize("release", releases()[1:])
def test_releases_from_17_on_have_what_every_adapter_passes(site: Path, release: str, op: str) -> None:
    write_package(site, release)
    assert refusal(op) is None


@pytest.mark.parametrize("op", NEEDS)
def test_the_release_before_is_refused_and_says_what_is_missing(site: Path, op: str) -> None:
    folder = write_package(site, releases()[0])
    why = refusal(op)
    assert why is not None and f"({folder}) is not served: aiter." in why and "gemma_norm" in why


def test_nothing_of_the_package_is_run(site: Path) -> None:
    folder = write_package(site, releases()[-1])
    for path in folder.rglob("*.py"):
        path.write_text(path.read_text(encoding="utf-8") + "\nraise SystemExit('imported')\n", encoding="utf-8")
    assert all(refusal(op) is None for op in NEEDS)
    assert "aiter" not in sys.modules


@pytest.mark.parametrize("op", NEEDS)
def test_each_parameter_of_the_table_is_looked_for(site: Path, op: str) -> None:
    """Take one away after the other: the answer names it, and the function that lacks it."""
    folder = write_package(site, releases()[-1])
    for need in NEEDS[op]:
        path = folder / need.path
        whole = path.read_text(encoding="utf-8")
        for name in need.passes:
            tree = ast.parse(whole)
            for one in ast.walk(tree):
                if isinstance(one, ast.FunctionDef) and one.name == need.function.rpartition(".")[2]:
                    for arg in one.args.args:
                        arg.arg = "renamed" if arg.arg == name else arg.arg
            path.write_text(ast.unparse(tree), encoding="utf-8")
            why = lacks(folder, need)
            assert why is not None and f"{need.function} has no parameter {name}" in why
        path.write_text(whole, encoding="utf-8")


NEED = Need("aiter.ops.one", "f", ("x", "out"))


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def f(x, out): ...", None),
        ("def f(out, x, more=1, *, other=2): ...", None),
        ("async def f(x, *, out): ...", None),
        ("@wrap(1)\ndef f(x, out=None): ...", None),
        ("try:\n    import a\nexcept ImportError:\n    def f(x, out): ...", None),
        ("if A:\n    def f(x, out): ...\nelse:\n    def f(x): ...", "has no parameter out"),
        ("def f(x, **kwargs): ...", "has no parameter out"),
        ("def f(x, /, out): ...", "has no parameter x"),
        ("def f(x, y, out): ...", "demands the parameter y, which we do not know"),
        ("def f(x, out, *, y): ...", "demands the parameter y"),
        ("def g(x, out): ...", "defines no f"),
        ("from .two import f", "defines no f"),
        ("class C:\n    def f(self, x, out): ...", "defines no f"),
        ("def g():\n    def f(x, out): ...", "defines no f"),
    ],
)
def test_definitions_are_read_as_a_caller_by_keyword_meets_them(tmp_path: Path, source: str, words: str | None) -> None:
    (tmp_path / "ops").mkdir()
    (tmp_path / "ops" / "one.py").write_text(source, encoding="utf-8")
    why = lacks(tmp_path, NEED)
    assert why is None if words is None else why is not None and words in why


def test_a_module_that_moved_is_named(tmp_path: Path) -> None:
    assert lacks(tmp_path, NEED) == "it has no module aiter.ops.one"


def test_methods_are_found_in_their_class_without_self() -> None:
    source = "class A:\n    def m(self, x): ...\nclass B:\n    if C:\n        def m(self, y, z=1): ..."
    assert [(one.names, one.required) for one in definitions(ast.parse(source), "B.m")] == [(("y", "z"), ("y",))]


def test_a_version_is_told_in_a_refusal_and_chooses_nothing(site: Path, write: Write) -> None:
    write({"amd_aiter-9.9.dist-info/METADATA": "Metadata-Version: 2.1\nName: amd-aiter\nVersion: 9.9\n"})
    folder = write_package(site, releases()[0])
    assert aiter_abi.installed_version() == "9.9"
    assert f"(amd-aiter 9.9, {folder}) is not served" in str(refusal("rms_norm"))


def test_the_document_names_every_function_that_is_called() -> None:
    document = (Path(__file__).parents[2] / "docs" / "aiter.md").read_text(encoding="utf-8")
    for op, needs in NEEDS.items():
        if op == "all_reduce":
            continue  # the class, told of in a sentence
        row = next(line for line in document.splitlines() if line.startswith("|") and op in line.split("|")[1])
        for need in needs:
            assert f"`{need.function}`" in row or (need.function == "shuffle_weight" and "shuffled at load" in row)
    assert all(release in document for release in releases()[1:])
