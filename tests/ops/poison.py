"""Memory that nobody has written yet, made to show: a kernel that leaves a hole in its output fails."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

_INTEGER = -1_000_003  # no id, no index, no count


def poison_(x: torch.Tensor) -> torch.Tensor:
    """Fill with NaN; integers with a number that is no id, no index and no count."""
    if x.dtype.itemsize == 1:
        codes = x.view(torch.uint8)
        codes.fill_(0x80 if x.dtype in (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz) else 0x7F)
        return x
    return x.fill_(float("nan") if x.dtype.is_floating_point else _INTEGER)


@contextmanager
def poisoned() -> Iterator[None]:
    """Have torch.empty and torch.empty_like return poisoned memory."""
    empty, empty_like = torch.empty, torch.empty_like

    def poisoned_empty(*sizes: Any, **options: Any) -> torch.Tensor:
        return poison_(empty(*sizes, **options))

    def poisoned_empty_like(x: torch.Tensor, **options: Any) -> torch.Tensor:
        return poison_(empty_like(x, **options))

    with mock.patch.object(torch, "empty", poisoned_empty), mock.patch.object(torch, "empty_like", poisoned_empty_like):
        yield
