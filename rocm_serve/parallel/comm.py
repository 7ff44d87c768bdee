"""Collectives as the layers see them. One protocol; gloo/RCCL, one-rank and simulated ranks behind it."""

from __future__ import annotations

from typing import Protocol

import torch


class Comm(Protocol):
    """A group of `size` ranks; all of them call the same methods in the same order."""

    rank: int
    size: int

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, the same bits on every rank; a row's bits do not depend on other rows (rank order)."""
        ...

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Stack every rank's `x` (same shape everywhere) along a new first dimension, in rank order."""
        ...


class SoloComm:
    """The group of one."""

    rank = 0
    size = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x.unsqueeze(0)
