"""How a process is watched from outside: it dies with its parent, and shows its stacks when asked.

A leaf: standard library only.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import stat
import threading

_STDIN = 0
_STDERR = 2
_EXIT_CODE = 1
STACKS_SIGNAL = signal.SIGUSR1


def show_stacks_on_signal() -> None:
    """Write the stacks of all threads to this process's log (standard error) on every SIGUSR1, and on a crash.

    The handler is in C: it answers also while a thread is stuck in a library with the interpreter's lock in hand.
    """
    faulthandler.enable(file=_STDERR)
    faulthandler.register(STACKS_SIGNAL, file=_STDERR, all_threads=True)


def show_stacks_now() -> None:
    """Write them without being asked."""
    faulthandler.dump_traceback(file=_STDERR, all_threads=True)


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
