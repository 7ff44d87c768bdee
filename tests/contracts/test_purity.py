"""Planning code loads no torch: seen in a fresh interpreter, because an __init__ file can load what no import names."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import grimp
import pytest

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
PURE_PACKAGES = ["config", "diagnostics", "tokens", "engine", "server"]
PURE_MODULES = [
    "types",
    "messages",
    "errors",
    "version",
    "cli",
    "supervisor",
    "executor.api",
    "executor.budget",
    "executor.experts_memory",
    "executor.limits",
    "executor.outside_memory",
    "executor.stage_memory",
    "executor.step_memory",
    "executor.step_rows",
    "executor.multiproc",
    "parallel.layout",
    "parallel.mesh",
    "parallel.expert_map",
    "parallel.expert_placement",
    "platform.facts",
    "platform.probe",
    "checkpoint.rules",
    "checkpoint.reader",
    "checkpoint.ledger",
    "models.qwen3_5.spec",
]
BANNED = ["torch", "triton", "transformers", "aiter", "mori"]

SCRIPT = """
import importlib, pkgutil, sys
names = sys.argv[1].split(",")
for name in names:
    module = importlib.import_module(name)
    for info in pkgutil.walk_packages(getattr(module, "__path__", []), name + "."):
        importlib.import_module(info.name)
print(",".join(sorted(name for name in {banned!r} if name in sys.modules)))
"""


def loaded_by(name: str) -> str:
    """Import a module (and all below it) in a fresh interpreter; return which banned packages that loaded."""
    script = SCRIPT.format(banned=BANNED)
    run = subprocess.run([sys.executable, "-c", script, name], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


@pytest.mark.parametrize("name", PURE_PACKAGES + PURE_MODULES)
def test_importing_a_pure_module_loads_no_torch(name: str) -> None:
    assert loaded_by(f"rocm_serve.{name}") == ""


def test_every_module_that_imports_no_torch_is_type_checked() -> None:
    graph = grimp.build_graph("rocm_serve", include_external_packages=True, cache_dir=None)
    with_torch = graph.find_downstream_modules("torch")
    checked = [Path(name) for name in tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["tool"]["mypy"]["files"]]
    for module in sorted(graph.modules - with_torch):
        path = Path(*module.split(".")).with_suffix(".py")
        if not (PYPROJECT.parent / path).is_file():
            continue  # a package, or a library
        assert path in checked or any(parent in checked for parent in path.parents), f"mypy is not told of {path}"


def test_the_check_sees_torch_where_it_is() -> None:
    assert loaded_by("rocm_serve.ops.batch") == "torch"
