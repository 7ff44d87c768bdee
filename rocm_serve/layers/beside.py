"""Work on a second stream of a GPU, beside what its caller does next: for steps that are recorded and then replayed.

A replay forks and joins without the host; a step that is launched kernel by kernel would have it wait for more calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_SIDE: ContextVar[torch.cuda.Stream | None] = ContextVar("side stream", default=None)


@contextmanager
def side_stream(stream: torch.cuda.Stream) -> Iterator[None]:
    """Have what is begun inside the block run on `stream`."""
    held = _SIDE.set(stream)
    try:
        yield
    finally:
        _SIDE.reset(held)


def begun(work: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Begin `work` on the second stream; return what waits for it. Without one, what does the work.

    It must be called before its caller is done: what one stream has allocated is not used again before the other has
    read it.
    """
    stream = _SIDE.get()
    if stream is None:
        return work
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        made = work()

    def joined() -> torch.Tensor:
        torch.cuda.current_stream().wait_stream(stream)
        return made

    return joined
