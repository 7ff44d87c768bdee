"""A step that the device has been given, and what comes of it: the host need not wait before it prepares the next.

Steps run in order on one stream, and so do the copies of what they leave. `Launched` is read in the same order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch

from rocm_serve.messages import Sampled, StepResult

_FIRST_BYTES = 1 << 13
_BUFFERS = 4  # one more step than this is never begun before the first is read


class Fetched:
    """A tensor on its way to the host; `event`: of its copy, None where it is there already."""

    def __init__(self, host: torch.Tensor, event: torch.cuda.Event | None) -> None:
        self._host = host
        self._event = event

    @property
    def there(self) -> bool:
        return self._event is None or self._event.query()

    def wait(self) -> torch.Tensor:
        """Return it. It is written over when its buffer's turn comes again."""
        if self._event is not None:
            self._event.synchronize()
        return self._host


class Fetch:
    """Small tensors to the host, each into the next of a few pinned buffers. One per thread and device."""

    def __init__(self, device: torch.device) -> None:
        self._pinned = device.type != "cpu"
        self._buffers = [torch.empty(0, dtype=torch.uint8) for _ in range(_BUFFERS)]
        self._events: list[torch.cuda.Event | None] = [None] * _BUFFERS
        self._next = 0
        self._marks: deque[torch.cuda.Event] = deque(maxlen=2)

    def mark(self, behind: int) -> Fetched | None:
        """Return nothing, which is there when all that was launched before a mark has run; None: it is.

        `behind` 0: before this mark; 1: before the one before it.
        """
        if not self._pinned:
            return None
        self._marks.append(event := torch.cuda.Event())
        event.record()
        return Fetched(torch.empty(0), self._marks[-1 - behind]) if len(self._marks) > behind else None

    def __call__(self, x: torch.Tensor) -> Fetched:
        """Begin to copy `x`, as it is when all that was launched before has run. The host does not wait."""
        if not self._pinned:
            return Fetched(x.clone(), None)
        at, self._next = self._next, (self._next + 1) % _BUFFERS
        if self._buffers[at].numel() < x.nbytes:
            room = max(_FIRST_BYTES, 1 << (x.nbytes - 1).bit_length())
            self._buffers[at] = torch.empty(room, dtype=torch.uint8, pin_memory=True)
        host = self._buffers[at][: x.nbytes].view(x.dtype).view(x.shape)
        host.copy_(x, non_blocking=True)
        event = self._events[at] = self._events[at] or torch.cuda.Event()
        event.record()
        return Fetched(host, event)


class Launched:
    """A step of the last stage. `finish` says what came of its works: called once, after every step before it.

    `fetched`: what is waited for first; None where `finish` computes on the device itself, and waits. `drawn_R3`: what
    the sampler says of the rows that draw, until the next step is launched; None where the host has a part in that.
    """

    def __init__(
        self,
        seq: int,
        finish: Callable[[], Sequence[Sampled]],
        fetched: Fetched | None = None,
        drawn_R3: torch.Tensor | None = None,
    ) -> None:
        self.seq = seq
        self.drawn_R3 = drawn_R3
        self._finish = finish
        self._fetched = fetched

    @property
    def ready(self) -> bool:
        """Whether waiting for the step to be over would gain nothing."""
        return self._fetched is None or self._fetched.there

    @torch.inference_mode()
    def result(self) -> StepResult:
        """Wait for the step. Errors: those of sampling."""
        if self._fetched is not None:
            self._fetched.wait()
        return StepResult(self.seq, tuple(self._finish()))


def joined(first: Launched, second: Launched) -> Launched:
    """Return two parts of one step as one, outcomes of `first` before those of `second`.

    The device was given `second` before `first`: what `first` waits for is behind both.
    """
    drawn_R3 = None
    if first.drawn_R3 is not None and second.drawn_R3 is not None:
        drawn_R3 = torch.cat([first.drawn_R3, second.drawn_R3])
    fetched = None if second._fetched is None else first._fetched

    def outcomes() -> tuple[Sampled, ...]:
        more = second._finish()  # what that has yet to draw is launched while the device runs `first`
        return (*first._finish(), *more)

    return Launched(first.seq, outcomes, fetched, drawn_R3)
