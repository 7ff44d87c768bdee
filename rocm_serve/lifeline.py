"""How a child process learns that its parent is gone. A leaf: standard library only."""

from __future__ import annotations

import os
import stat
import threading

_STDIN = 0
_EXIT_CODE = 1


def die_with_parent() -> None:
    """End this process, at once, when the pipe that the supervisor gave it as standard input closes.

    The kernel closes the supervisor's end however the supervisor dies. With any other standard input (a terminal,
    /dev/null) the process was started by hand and is left alone.
    """
    if stat.S_ISFIFO(os.fstat(_STDIN).st_mode):
        threading.Thread(target=_watch, name="lifeline", daemon=True).start()


def _watch() -> None:
    while os.read(_STDIN, 1024):
        pass
    os._exit(_EXIT_CODE)
