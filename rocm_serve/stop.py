"""A server that is told to stop before it serves; an end that no thread can spoil. A leaf: standard library only."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

CORE_THREAD = "engine-core"
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class ToldToStop(BaseException):
    """SIGTERM or SIGINT came while starting up. No Exception: nothing but `until_told_to_stop` may take it."""


@contextmanager
def until_told_to_stop() -> Iterator[None]:
    """Leave the block at the first SIGTERM or SIGINT, cleaning up on the way; more of them do not disturb that.

    For a main thread. What the block installs itself (the server's own handlers) takes over from these.
    """
    asked = False

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if not asked:
            asked = True
            raise ToldToStop

    before = {number: signal.signal(number, on_signal) for number in _SIGNALS}
    try:
        yield
    except ToldToStop:
        pass
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def end(code: int) -> NoReturn:
    """End the process with `code`.

    A core thread that is still inside torch would abort the interpreter on its way out (exit code 134), so with one
    the process ends at once. Everything else has been cleaned up by then.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    if any(thread.name == CORE_THREAD for thread in threading.enumerate()):
        os._exit(code)
    sys.exit(code)
