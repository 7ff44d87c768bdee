"""Collectives as the layers see them. One protocol; gloo/RCCL, one-rank and simulated ranks behind it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist

R = TypeVar("R")
T = TypeVar("T")


class Comm(Protocol):
    """A group of `size` ranks; all of them call the same methods in the same order."""

    rank: int
    size: int
    graph_refusal: str | None
    """Why calls cannot be part of a captured device graph; None: they can."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, the same bits on every rank; a row's bits do not depend on other rows (rank order).

        The memory of `x` may be used for the result.
        """
        ...

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Stack every rank's `x` (same shape everywhere) along a new first dimension, in rank order."""
        ...

    def all_to_all(self, x: torch.Tensor, send_rows: Sequence[int], receive_rows: Sequence[int]) -> torch.Tensor:
        """Send the first send_rows[0] rows of `x` to rank 0, the next to rank 1 and so on; return what came, by rank.

        Shapes: x [sum(send_rows), ...] -> [sum(receive_rows), ...]; the same dtype and width on every rank. A rank that
        has nothing to send or receive calls it too. `receive_rows[r]` is what rank r sends here.
        """
        ...


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """Return the same memory as a type that every collective library carries: FP8 and bool as bytes.

    gloo refuses float8 ("Invalid scalar type"); bytes are what crosses the wire either way.
    """
    return x.view(torch.uint8) if x.dtype == torch.bool or x.dtype.is_floating_point and x.itemsize == 1 else x


class SoloComm:
    """The group of one."""

    rank = 0
    size = 1
    graph_refusal: str | None = None

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x.unsqueeze(0)

    def all_to_all(self, x: torch.Tensor, send_rows: Sequence[int], receive_rows: Sequence[int]) -> torch.Tensor:
        assert [x.shape[0]] == list(send_rows) == list(receive_rows)
        return x


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

    graph_refusal: str | None = "gloo's collectives run on the host"

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return sum_in_rank_order(self.all_gather(x))

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty((self.size, *x.shape), dtype=x.dtype, device=x.device)
        if x.numel():
            dist.all_gather(list(as_bytes(out).unbind(0)), as_bytes(x.contiguous()), group=self.group)
        return out

    def all_to_all(self, x: torch.Tensor, send_rows: Sequence[int], receive_rows: Sequence[int]) -> torch.Tensor:
        return _all_to_all(self.group, x, send_rows, receive_rows)


class NcclComm:
    """Ranks as GPUs over RCCL or NCCL. Reduces in place, in the library's order of summation."""

    graph_refusal: str | None = None

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
            dist.all_gather_into_tensor(as_bytes(out), as_bytes(x.contiguous()), group=self._group)
        return out

    def all_to_all(self, x: torch.Tensor, send_rows: Sequence[int], receive_rows: Sequence[int]) -> torch.Tensor:
        return _all_to_all(self._group, x, send_rows, receive_rows)


def _all_to_all(
    group: dist.ProcessGroup, x: torch.Tensor, send_rows: Sequence[int], receive_rows: Sequence[int]
) -> torch.Tensor:
    assert x.shape[0] == sum(send_rows), f"{x.shape[0]} rows, but {list(send_rows)} are to be sent"
    out = x.new_empty(sum(receive_rows), *x.shape[1:])
    dist.all_to_all_single(as_bytes(out), as_bytes(x.contiguous()), list(receive_rows), list(send_rows), group=group)
    return out


class ThreadComm:
    """One of several simulated ranks, each a thread of this process. Same arithmetic as GlooComm."""

    graph_refusal: str | None = "simulated ranks meet on the host"

    def __init__(self, rank: int, shared: Meeting) -> None:
        self.rank = rank
        self.size = shared.size
        self._shared = shared

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return sum_in_rank_order(self.all_gather(x))

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return self._shared.meet(self.rank, "all_gather", x, _stack)

    def all_to_all(self, x: torch.Tensor, send_rows: Sequence[int], receive_rows: Sequence[int]) -> torch.Tensor:
        assert x.shape[0] == sum(send_rows), f"{x.shape[0]} rows, but {list(send_rows)} are to be sent"
        pieces = x.split(list(send_rows))

        def mine(brought: list[tuple[torch.Tensor, ...]]) -> torch.Tensor:
            came = [pieces[self.rank] for pieces in brought]
            kinds = {(tuple(piece.shape[1:]), piece.dtype) for piece in came}
            assert len(kinds) == 1, f"the ranks met with different tensors: {kinds}"
            sent = [piece.shape[0] for piece in came]
            assert sent == list(receive_rows), f"rank {self.rank} expects {list(receive_rows)} rows and is sent {sent}"
            return torch.cat(came)

        return self._shared.meet(self.rank, "all_to_all", pieces, mine)


def _stack(parts: list[torch.Tensor]) -> torch.Tensor:
    shapes = {(tuple(part.shape), part.dtype) for part in parts}
    assert len(shapes) == 1, f"the ranks met with different tensors: {shapes}"
    return torch.stack(parts)


class Meeting:
    """Where simulated ranks meet. A rank that is through with its body comes once more, to "the end"."""

    def __init__(self, size: int, timeout_s: float | None = None) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=timeout_s)
        self._brought: list[tuple[str, object]] = [("", None)] * size

    def meet(self, rank: int, what: str, brought: T, take: Callable[[list[T]], R]) -> R:
        """Bring one thing, return what `take` makes of the things of all ranks, in rank order.

        `take` copies: once every rank has taken, each may write over what it brought.
        """
        self._brought[rank] = (what, brought)
        self.barrier.wait()
        calls = {name for name, _ in self._brought}
        if len(calls) > 1:
            raise AssertionError(f"the ranks did not make the same number of collective calls: {sorted(calls)} met")
        out = take([thing for _, thing in self._brought])  # type: ignore[misc]
        self.barrier.wait()
        return out


def run_ranks(size: int, body: Callable[[ThreadComm], R]) -> list[R]:
    """Run `body` once per simulated rank, each in its own thread; return the results in rank order.

    Errors: the first failing rank's own exception is raised here; ranks that wait for it are set free.
    """
    shared = Meeting(size)
    results: dict[int, R] = {}
    errors: list[BaseException] = []

    def one(rank: int) -> None:
        try:
            result = body(ThreadComm(rank, shared))
            shared.meet(rank, "the end", None, len)
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
        self.graph_refusal = inner.graph_refusal
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

    def all_to_all(self, x: torch.Tensor, send_rows: Sequence[int], receive_rows: Sequence[int]) -> torch.Tensor:
        """Rows that stay on this rank are not counted: they cross no wire."""
        own = sum(send_rows[: self.rank])
        self._count("all_to_all", torch.cat([x[:own], x[own + send_rows[self.rank] :]]))
        return self._inner.all_to_all(x, send_rows, receive_rows)
