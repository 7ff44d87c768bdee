"""Notes that ranks leave for one another, each written once, read by whoever waits for it. Text only.

For what has to be the same everywhere and takes unknown time on one rank: a collective would run into its timeout.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import torch.distributed as dist

_LOOK_S = 0.05


class Board(Protocol):
    """`rank` of `size` at the same board."""

    rank: int
    size: int

    def post(self, name: str, text: str) -> None:
        """Leave a note."""
        ...

    def look(self, name: str) -> str | None:
        """Return a note, or None while it is not there."""
        ...


class NotesOfOneProcess:
    """A board without a network: for one rank, and for ranks that are threads and share `notes`."""

    def __init__(self, rank: int = 0, size: int = 1, notes: dict[str, str] | None = None) -> None:
        self.rank = rank
        self.size = size
        self._notes = {} if notes is None else notes

    def post(self, name: str, text: str) -> None:
        assert name not in self._notes, f"{name} is written twice"
        self._notes[name] = text

    def look(self, name: str) -> str | None:
        return self._notes.get(name)


class StoreBoard:
    """Notes in the store of torch.distributed that the ranks met at."""

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._store = dist.PrefixStore("board", store)

    def post(self, name: str, text: str) -> None:
        self._store.set(name, text)

    def look(self, name: str) -> str | None:
        if not self._store.check([name]):
            return None
        return bytes(self._store.get(name)).decode()


def read(board: Board, name: str, moved: Callable[[], None], within_s: float) -> str:
    """Wait for a note; `moved` is called now and then.

    Errors: TimeoutError.
    """
    end = time.monotonic() + within_s
    while (text := board.look(name)) is None:
        if time.monotonic() > end:
            raise TimeoutError(f"rank {board.rank} has waited {within_s:.0f} s for {name}")
        moved()
        time.sleep(_LOOK_S)
    return text
