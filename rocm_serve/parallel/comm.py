"""Collectives as the layers see them. One protocol; gloo/RCCL, one-rank and simulated ranks behind it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist

R = TypeVar("R")


class Comm(Protocol):
    """A group of `size` ranks; all of them call the same methods in the same order."""

    rank: int
    size: int

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, the same bits on every rank; a row's bits do not depend on other rows (rank order).

        The memory of `x` may be used for the result.
        """
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


def sum_in_rank_order(parts: torch.Tensor) -> torch.Tensor:
    """Add [ranks, ...] over ranks in float32, first rank first, rounding once at the end."""
    total = parts[0].to(torch.float32, copy=True)
    for part in parts[1:]:
        total += part
    return total.to(parts.dtype)


class GlooComm:
    """Ranks as processes over gloo. Slow and exact: the CPU reference of every parallel run.

    gloo's own all-reduce cuts the buffer into one segment a rank and adds each segment in another order, so a row's
    bits would depend on where it lies in the batch. Gathering and adding in rank order costs bandwidth only.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return sum_in_rank_order(self.all_gather(x))

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty((self.size, *x.shape), dtype=x.dtype, device=x.device)
        if x.numel():
            dist.all_gather(list(out.unbind(0)), x.contiguous(), group=self._group)
        return out


class NcclComm:
    """Ranks as GPUs over RCCL or NCCL. Reduces in place, in the library's order of summation."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if x.numel():
            dist.all_reduce(x, group=self._group)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty((self.size, *x.shape), dtype=x.dtype, device=x.device)
        if x.numel():
            dist.all_gather_into_tensor(out, x.contiguous(), group=self._group)
        return out


class ThreadComm:
    """One of several simulated ranks, each a thread of this process. Same arithmetic as GlooComm."""

    def __init__(self, rank: int, shared: _Meeting) -> None:
        self.rank = rank
        self.size = shared.size
        self._shared = shared

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return sum_in_rank_order(self.all_gather(x))

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        stacked = self._shared.exchange(self.rank, x)
        assert stacked is not None
        return stacked


class _Meeting:
    """Where simulated ranks meet. A rank that is through with its body brings None, once."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size)
        self._brought: list[torch.Tensor | None] = [None] * size

    def exchange(self, rank: int, x: torch.Tensor | None) -> torch.Tensor | None:
        self._brought[rank] = x
        self.barrier.wait()
        parts = [part for part in self._brought if part is not None]
        if len(parts) not in (0, self.size):
            raise AssertionError("the ranks did not make the same number of collective calls")
        shapes = {(tuple(part.shape), part.dtype) for part in parts}
        assert len(shapes) <= 1, f"the ranks met with different tensors: {shapes}"
        out = torch.stack(parts) if parts else None
        self.barrier.wait()
        return out


def run_ranks(size: int, body: Callable[[ThreadComm], R]) -> list[R]:
    """Run `body` once per simulated rank, each in its own thread; return the results in rank order.

    Errors: the first failing rank's own exception is raised here; ranks that wait for it are set free.
    """
    shared = _Meeting(size)
    results: dict[int, R] = {}
    errors: list[BaseException] = []

    def one(rank: int) -> None:
        try:
            result = body(ThreadComm(rank, shared))
            shared.exchange(rank, None)
            results[rank] = result
        except threading.BrokenBarrierError:
            return  # another rank failed first and its error is in the list
        except BaseException as error:
            errors.append(error)
            shared.barrier.abort()

    threads = [threading.Thread(target=one, args=(rank,), name=f"rank-{rank}") for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(size)]


class CountingComm:
    """Counts what passes through another Comm: calls and bytes of this rank's tensors, per collective."""

    def __init__(self, inner: Comm) -> None:
        self._inner = inner
        self.rank = inner.rank
        self.size = inner.size
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def _count(self, name: str, x: torch.Tensor) -> None:
        self.calls[name] += 1
        self.bytes[name] += x.numel() * x.element_size()

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self._count("all_reduce", x)
        return self._inner.all_reduce(x)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        self._count("all_gather", x)
        return self._inner.all_gather(x)
