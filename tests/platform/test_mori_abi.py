"""Finding MORI and reading its names: nothing of it is imported, and what is missing is told."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from rocm_serve.platform.mori_abi import CONFIG_FIELDS, NEEDS, config_fields, find_mori, refusal, refusal_of
from tests.parallel.mori_package import releases, write_package


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the import path, before all others."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_without_a_package_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    assert refusal() == (
        "is not installed; install amd-mori 1.2.4 or newer: it has packages for Python 3.12 with glibc 2.39 or newer"
    )


def test_the_latest_release_is_served(site: Path) -> None:
    folder = write_package(site)
    assert find_mori() == (folder, "") and refusal() is None


def test_release_1_0_0_is_refused_by_what_it_lacks(site: Path) -> None:
    folder = write_package(site, releases()[0])
    assert releases()[0] == "1.0.0"
    why = refusal()
    assert why is not None and why.startswith(f"({folder}) is not served: ")
    assert "has no field max_total_recv_tokens, so it checks neither ids nor the rows of combine; install" in why


def test_a_version_is_told_in_a_refusal_and_chooses_nothing(site: Path) -> None:
    info = site / "amd_mori-1.2.4.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: amd-mori\nVersion: 1.2.4\n", encoding="utf-8")
    folder = write_package(site, "1.0.0")
    why = refusal()
    assert why is not None and why.startswith(f"(amd-mori 1.2.4, {folder}) is not served")


def test_another_package_of_that_name_is_not_taken_for_it(site: Path) -> None:
    (site / "mori").mkdir()
    (site / "mori" / "__init__.py").write_text("raise SystemExit('imported')", encoding="utf-8")
    assert f"in {site / 'mori'} is not AMD's: it has no ops and shmem; remove it" in find_mori()[1]


def test_a_single_module_is_named(site: Path) -> None:
    (site / "mori.py").write_text("", encoding="utf-8")
    assert f"is no package here but one file, {site / 'mori.py'}" in find_mori()[1]


def test_nothing_of_the_package_is_run(site: Path) -> None:
    for path in write_package(site).rglob("*.py"):
        path.write_text(path.read_text(encoding="utf-8") + "\nraise SystemExit('imported')\n", encoding="utf-8")
    assert refusal() is None
    assert "mori" not in sys.modules


@pytest.mark.parametrize("name", CONFIG_FIELDS)
def test_each_field_of_the_configuration_is_looked_for(tmp_path: Path, name: str) -> None:
    folder = write_package(tmp_path)
    path = folder / "ops" / "dispatch_combine.py"
    path.write_text(path.read_text(encoding="utf-8").replace(f"    {name}: ", "    renamed: "), encoding="utf-8")
    why = refusal_of(folder)
    assert why is not None and f"EpDispatchCombineConfig has no field {name}" in why


def test_a_field_that_must_be_given_and_is_not_known_is_named(tmp_path: Path) -> None:
    folder = write_package(tmp_path)
    path = folder / "ops" / "dispatch_combine.py"
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("    rank: int\n", "    rank: int\n    plane: int\n"), encoding="utf-8")
    assert "EpDispatchCombineConfig demands the field plane, which we do not know" in str(refusal_of(folder))
    path.write_text(text.replace("block_num: int = 80", "block_num: int = 80\n    plane: int = 0"), encoding="utf-8")
    assert refusal_of(folder) is None


@pytest.mark.parametrize("need", NEEDS, ids=lambda need: need.function)
def test_each_parameter_is_looked_for(tmp_path: Path, need) -> None:  # type: ignore[no-untyped-def]
    folder = write_package(tmp_path)
    path = folder / need.path
    whole = path.read_text(encoding="utf-8")
    function = need.function.rpartition(".")[2]
    for name in need.passes:
        tree = ast.parse(whole)
        for one in ast.walk(tree):
            if isinstance(one, ast.FunctionDef) and one.name == function:
                for arg in one.args.args:
                    arg.arg = "renamed" if arg.arg == name else arg.arg
        path.write_text(ast.unparse(tree), encoding="utf-8")
        assert f"{need.function} has no parameter {name}" in str(refusal_of(folder))
    path.write_text(whole.replace(f"def {function}(", "def gone("), encoding="utf-8")
    assert f"{need.module} defines no {need.function}" in str(refusal_of(folder))
    path.unlink()
    assert f"it has no module {need.module}" in str(refusal_of(folder))


def test_fields_are_read_with_whether_they_may_be_left_out() -> None:
    source = (
        "class Other:\n    a: int\nclass EpDispatchCombineConfig:\n    'Text.'\n    b: int\n    c: int = 1\n    d = 2"
    )
    assert config_fields(ast.parse(source)) == {"b": False, "c": True}
    assert config_fields(ast.parse("x = 1")) == {}
