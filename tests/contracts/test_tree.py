"""The tree keeps its own rules, and the tools that check them find planted faults."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def check_tree() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_tree", ROOT / ".ci/check_tree.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_sizes_changelog_and_paths_are_in_order() -> None:
    run = subprocess.run([sys.executable, ".ci/check_tree.py"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout


def test_a_long_function_and_a_long_file_are_found(check_tree: ModuleType) -> None:
    long_function = "def f():\n" + "    x = 1\n" * 60
    assert len(check_tree.size_findings(Path("x.py"), long_function)) == 1
    assert check_tree.size_findings(Path("x.py"), "x = 1\n" * 500) == []
    assert len(check_tree.size_findings(Path("x.py"), "x = 1\n" * 501)) == 1


def test_a_path_of_one_machine_is_found(check_tree: ModuleType) -> None:
    for path in ("/wor" + "k/main", "/tm" + "p/x", "/roo" + "t/.cache"):
        assert check_tree.path_findings(Path("x.md"), f"fine\nsee {path}") != []
    assert check_tree.path_findings(Path("x.md"), "see docs/work.md and tmp_path / 'x'") == []


def test_a_changelog_of_another_version_is_found(check_tree: ModuleType) -> None:
    version = 'VERSION = "1.2.3"'
    assert check_tree.changelog_findings("# C\n\n## [1.2.3] - x\n", version) == []
    assert check_tree.changelog_findings("# C\n\n## [1.2.2] - x\n## [1.2.3]", version) != []
    assert check_tree.changelog_findings("# C\n", version) != []


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    program = shutil.which("lint-imports", path=str(Path(sys.executable).parent))
    assert program is not None, "import-linter is not installed beside this interpreter"
    environment = {"PYTHONPATH": str(root), "PATH": str(Path(sys.executable).parent)}
    return subprocess.run(
        [program, "--no-cache"], cwd=root, env=environment, capture_output=True, text=True, check=False
    )


def test_import_contracts_hold() -> None:
    run = lint_imports(ROOT)
    assert run.returncode == 0, run.stdout


PLANTED = [
    ("layers/planted_1.py", "import rocm_serve.engine.scheduler", "Arrows point one way"),
    ("engine/planted_2.py", "import torch", "Planning imports no torch"),
    ("layers/planted_3.py", "import triton", "Only ops/*/triton.py imports triton"),
    ("ops/planted_4.py", "import aiter", "Only ops/*/aiter.py imports aiter"),
    ("ops/comm/planted_7.py", "import mori", "Only parallel/exchange/mori.py imports mori"),
    ("tokens/planted_5.py", "import transformers", "transformers is a reference for tests, never a part"),
    ("server/planted_6.py", "import rocm_serve.executor.api", "The server knows the engine's client, not the executor"),
    ("errors.py", "import rocm_serve.config.schema", "types, messages and errors are leaves"),
]


def test_every_import_contract_finds_a_planted_fault(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "rocm_serve", tmp_path / "rocm_serve", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for file, line, _ in PLANTED:
        with (tmp_path / "rocm_serve" / file).open("a", encoding="utf-8") as out:
            out.write(line + "\n")
    run = lint_imports(tmp_path)
    broken = {match[1] for match in re.finditer(r"^(.*) BROKEN( \(\d+ ignored imports?\))?$", run.stdout, re.MULTILINE)}
    assert broken == {contract for _, _, contract in PLANTED}, run.stdout
