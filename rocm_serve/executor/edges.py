"""The residual stream from stage to stage: forward only, receives posted early, buffers never reused in flight.

Tokens go from the last stage to the first by the same two ends, over an edge of their own (newest.py).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from rocm_serve.parallel.groups import EdgeGroup

# gloo's own limit would end a step with the name of a buffer; that it takes too long is the core's to tell, and that a
# rank stands still the watchdog's.
_NO_LIMIT = timedelta(days=30)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A posted receive."""

    work: dist.Work
    x_TH: torch.Tensor

    def wait(self) -> torch.Tensor:
        """Block until the previous stage's rows are here."""
        _wait(self.work, self.x_TH)
        return self.x_TH


class Receiver:
    """This stage's end of the edge from the previous stage. Messages arrive in the order of the posts."""

    def __init__(self, edge: EdgeGroup, *, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._edge = edge
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._device = device

    def post(self, rows: int) -> Arrival:
        """Ask for the next message, of `rows` rows, and return at once."""
        x_TH = torch.empty((rows, self._hidden_size), dtype=self._dtype, device=self._device)
        work = dist.irecv(x_TH, self._edge.peer, group=self._edge.group)
        assert work is not None
        return Arrival(work, x_TH)


class Sender:
    """This stage's end of the edge to the next stage, with room for `slots` messages on their way.

    A tensor that is on its way is held here, so nobody else gets its memory; with all slots taken the oldest message
    is waited for.
    """

    def __init__(self, edge: EdgeGroup, *, slots: int) -> None:
        self._edge = edge
        self._slots = slots
        self._flying: deque[tuple[dist.Work, torch.Tensor]] = deque()

    def send(self, x_TH: torch.Tensor) -> None:
        """Hand over `x_TH`: the caller must not write to it any more."""
        if len(self._flying) == self._slots:
            _wait(*self._flying.popleft())
        x_TH = x_TH.contiguous()
        work = dist.isend(x_TH, self._edge.peer, group=self._edge.group)
        assert work is not None
        self._flying.append((work, x_TH))

    def flush(self) -> None:
        """Wait for everything on its way."""
        while self._flying:
            _wait(*self._flying.popleft())


def _wait(work: dist.Work, x_TH: torch.Tensor) -> None:
    if x_TH.device.type == "cpu":
        work.wait(_NO_LIMIT)
    else:
        work.wait()  # NCCL would block the host for a limit of its own
