"""Fixtures of the tests in two network namespaces."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.made import small_checkpoint
from tests.two_hosts.namespaces import TwoHosts, why_not


@pytest.fixture(scope="session")
def _namespaces() -> None:
    """Skip where there is no right to make any: tests/allowed_skips.txt names none of these, so CI fails then."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture
def hosts(_namespaces: None) -> Iterator[TwoHosts]:
    """Two hosts with nothing on them."""
    with TwoHosts() as two:
        yield two


@pytest.fixture(scope="session")
def four_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_checkpoint(tmp_path_factory.mktemp("two-hosts") / "tiny", "text-bf16", "bf16", seed=11)
