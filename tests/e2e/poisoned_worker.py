"""A rank of the real worker whose edges spoil what must not be in use: rows sent, and rows not yet received.

A slot given back before its bytes have left, or a receive that is read before it has come, shows as NaN, which the
sampler refuses.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from rocm_serve.executor import edges, worker


class Sent:
    """A send that is over once it was waited for: its rows become NaN then."""

    def __init__(self, work: dist.Work, rows: torch.Tensor) -> None:
        self._work = work
        self._rows = rows

    def wait(self, *limit: Any) -> None:
        self._work.wait(*limit)
        with torch.inference_mode():
            self._rows.fill_(torch.nan)


def isend(rows: torch.Tensor, *where: Any, **group: Any) -> Sent:
    work = dist.isend(rows, *where, **group)
    assert work is not None
    return Sent(work, rows)


def irecv(rows: torch.Tensor, *where: Any, **group: Any) -> dist.Work | None:
    return dist.irecv(rows.fill_(torch.nan), *where, **group)


def poison_edges() -> None:
    """Have this process's edges send and receive so."""
    edges.dist = SimpleNamespace(isend=isend, irecv=irecv)  # type: ignore[attr-defined]


if __name__ == "__main__":
    poison_edges()
    worker.main()
