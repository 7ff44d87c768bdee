"""Fixtures of end-to-end tests: checkpoints and HF references on demand, servers whose output is shown on failure."""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import cache
from pathlib import Path

import pytest

from tests.e2e import harness, hf
from tests.made import small_checkpoint

MTP = {"text-bf16": "bf16", "text-fp8": "bf16", "vl-fp8": "fp8", "dense": "bf16"}
# Three GDN layers and one with KV pages. The cheapest layout has two of these groups, as has the trained checkpoint.
LAYERS = {"dense": 8}


@pytest.fixture(scope="session")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Make a checkpoint of a layout, once a session."""
    root = tmp_path_factory.mktemp("e2e")

    def make(layout: str) -> Path:
        return small_checkpoint(root / layout, layout, MTP[layout], seed=3, layers=LAYERS.get(layout, 4))

    return cache(make)


@pytest.fixture(scope="session")
def reference_of(checkpoint_of: Callable[[str], Path]) -> Callable[[str], hf.Reference]:
    """Load the HF reference of a layout, once a session."""
    return cache(lambda layout: hf.load(checkpoint_of(layout)))


@pytest.fixture
def server_of(checkpoint_of: Callable[[str], Path], tmp_path: Path) -> Callable[..., harness.Server]:
    """Make a server of a layout with the flags given; the caller enters it with `with`."""

    def make(layout: str, *flags: object) -> harness.Server:
        words = [str(flag) for flag in flags]
        return harness.Server(checkpoint_of(layout), tmp_path / ("server" + "".join(words)), words)

    return make


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Attach the end of each live server's output to the report of a failing test."""
    report = yield
    if report.failed:
        for server in harness.LIVE:
            report.sections.append((f"output of {server.base_url or server.work_dir}", server.log[-8000:]))
    return report
