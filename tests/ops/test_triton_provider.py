"""The Triton providers as a machine without Triton sees them: what they are called with, and where they are refused."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import rocm_serve.ops
from rocm_serve.errors import UserError
from rocm_serve.ops.bind import OPS, bind_ops
from rocm_serve.ops.contract import Provider
from rocm_serve.platform.facts import fp8_dialect
from rocm_serve.platform.table import archs_of

FOLDERS = {"add_rms_norm": "rms_norm", "draw_token": "sampling", "log_sum_exp": "sampling"}
PROVIDED = [name for name, op in OPS.items() if "triton" in op.providers]


def function(op: str) -> ast.FunctionDef:
    folder = Path(rocm_serve.ops.__file__).parent / FOLDERS.get(op, op)
    tree = ast.parse((folder / "triton.py").read_text(encoding="utf-8"))
    return next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == op)


@pytest.mark.parametrize("op", PROVIDED)
def test_a_provider_has_the_parameters_of_the_reference(op: str) -> None:
    source = inspect.getsource(OPS[op].reference)
    (reference,) = (node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef))
    assert ast.dump(function(op).args) == ast.dump(reference.args)


@pytest.mark.parametrize("op", PROVIDED)
def test_a_cpu_is_refused_in_words(op: str) -> None:
    with pytest.raises(UserError, match=rf"--op {op}=triton: triton runs on gfx.*, not on cpu"):
        bind_ops({op: "triton"}, "cpu")


@pytest.mark.parametrize("op", ["fp8_linear", "moe_experts"])
@pytest.mark.parametrize(("arch", "has_fp8"), [("sm_80", False), ("sm_89", True), ("sm_90", True), ("sm_120", True)])
def test_fp8_products_are_refused_where_triton_has_no_instruction_for_them(op: str, arch: str, has_fp8: bool) -> None:
    why = OPS[op].providers["triton"].refusal(arch, {})
    assert (why or "").startswith("runs on") is not has_fp8


def test_rows_in_half_precision_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert "not float16" in (OPS["silu_mul"].providers["triton"].refusal("sm_90", {"dtype": "float16"}) or "")
    assert OPS["silu_mul"].providers["triton"].refusal("sm_90", {"dtype": "float32"}) is None


def test_where_triton_is_missing_the_refusal_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "needs the package triton" in (OPS["silu_mul"].providers["triton"].refusal("gfx942", {}) or "")


def test_binding_on_a_cpu_imports_no_triton() -> None:
    code = "import sys; from rocm_serve.ops.bind import bind_ops; bind_ops({}, 'cpu'); print('triton' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


@pytest.mark.parametrize(
    "arch", ["gfx90a", "gfx942", "gfx950", "gfx1100", "sm_80", "sm_86", "sm_89", "sm_90", "sm_120"]
)
def test_fp8_kernels_are_offered_where_the_platform_says_there_is_fp8(arch: str) -> None:
    provider = Provider("triton", load=lambda: torch.empty, archs=archs_of("moe_experts", "triton"))
    dialect = fp8_dialect("rocm" if arch.startswith("gfx") else "cuda", arch)
    assert (provider.refusal(arch, {}) is None) == (dialect != "none")
