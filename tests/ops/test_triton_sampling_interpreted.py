"""Triton kernels of sampling, interpreted."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ops.interpreted_sampling import LIMITS
from tests.ops.interpreting import found_by, judge, needs_triton

pytestmark = needs_triton


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return found_by("tests.ops.interpreted_sampling")


@pytest.mark.parametrize("name", LIMITS)
def test_a_kernel_reads_and_writes_where_it_should(name: str, found: dict[str, Any]) -> None:
    judge(name, found, LIMITS)
