"""Runs a module of interpreted kernels in a process of its own: Triton chooses its interpreter when it is imported."""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

ROOT = Path(__file__).parents[2]
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed here")


def found_by(module: str) -> dict[str, Any]:
    """Return the errors of every kernel by name, and the seed of their inputs."""
    seed = secrets.randbits(31)
    run = subprocess.run(
        [sys.executable, "-m", module, str(seed)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, f"seed {seed}:\n{run.stderr[-4000:]}"
    return {"seed": seed, **json.loads(run.stdout.splitlines()[-1])}


@contextmanager
def patched_once() -> Iterator[None]:
    """Have the interpreter turn Triton's language into its own once a launch.

    It does so anew for each call of a function inside a kernel: that changes nothing and is a third of the time.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    patch: Callable[..., Any] = interpreter._patch_lang

    def once(fn: Any) -> Any:
        seen = [module for module in (tl, tl.core) if any(module is value for value in fn.__globals__.values())]
        return patch(fn) if any(tl.core.is_builtin(module.load) for module in seen) else interpreter._LangPatchScope()

    with mock.patch.object(interpreter, "_patch_lang", once):
        yield


def judge(name: str, found: Mapping[str, Any], limits: Mapping[str, float]) -> None:
    """Fail where a kernel did not run, or where an error is over its limit."""
    errors = found[name]
    assert isinstance(errors, list) and errors, f"seed {found['seed']}: {errors}"
    assert all(error <= limits[name] for error in errors), f"seed {found['seed']}: {errors} > {limits[name]}"
