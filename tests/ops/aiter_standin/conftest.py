"""Fixtures: one release's stand-in on the import path, and nothing left of it afterwards."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.ops.aiter_standin.checks import dtypes
from tests.ops.aiter_standin.package import write_package

Install = Callable[..., Path]
_OURS = re.compile(r"aiter(\..*)?|rocm_serve\.ops\.\w+\.aiter")


def _forget() -> None:
    for name in [name for name in sys.modules if _OURS.fullmatch(name)]:
        del sys.modules[name]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Return a function that installs one release, for GPUs of one FP8 dialect."""

    def one(release: str, fp8: torch.dtype = torch.float8_e4m3fn) -> Path:
        folder = write_package(tmp_path, release)
        monkeypatch.setattr(dtypes, "fp8", fp8)
        monkeypatch.syspath_prepend(str(tmp_path))
        return folder

    _forget()
    yield one
    _forget()
