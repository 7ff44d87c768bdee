"""Several child processes that compile at once, into a cache on disk that the process which times reads. No torch."""

from __future__ import annotations

import queue
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future

import msgspec

from rocm_serve.config.load import environment
from rocm_serve.tuning.wish import Point, Wish

_MODULE = "rocm_serve.tuning.compile_child"
Work = tuple[bytes, "Future[str]"]


class Compilers:
    """`count` children, each fed by a thread of its own. What a job's future holds is why it failed, or ""."""

    def __init__(self, wish: Wish, count: int, command: Sequence[str] = (sys.executable, "-m", _MODULE)) -> None:
        self._wish, self._command = wish, list(command)
        self._jobs: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._children: list[subprocess.Popen[bytes]] = []
        self._stopped = False
        self._threads = [threading.Thread(target=self._feed, daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def compile(self, point: Point, kernel: str = "", tile: dict[str, int] | None = None) -> Future[str]:
        """Have one call compiled with one tile of one kernel; without a kernel, with the tiles that it gets anyway."""
        future: Future[str] = Future()
        job = msgspec.json.encode({"point": point, "kernel": kernel, "tile": tile or {}})
        self._jobs.put((job, future))
        return future

    def stop(self) -> None:
        """End the children; what has not begun is left out."""
        self._stopped = True
        for _ in self._threads:
            self._jobs.put(None)
        for child in list(self._children):
            child.kill()
        for thread in self._threads:
            thread.join()

    def _feed(self) -> None:
        child: subprocess.Popen[bytes] | None = None
        while (job := self._jobs.get()) is not None and not self._stopped:
            child = child or self._start()
            answer = _ask(child, job[0])
            if not answer:  # a tile may end its compiler: the next one gets another
                self._end(child)
                child = None
            job[1].set_result(answer.decode().rstrip("\n") if answer else "its compiler has ended")
        if child is not None:
            self._end(child)

    def _start(self) -> subprocess.Popen[bytes]:
        pipe = subprocess.PIPE
        child = subprocess.Popen(self._command, stdin=pipe, stdout=pipe, bufsize=0, env=environment())
        self._children.append(child)
        assert child.stdin is not None
        child.stdin.write(msgspec.json.encode(self._wish) + b"\n")
        return child

    def _end(self, child: subprocess.Popen[bytes]) -> None:
        self._children.remove(child)
        child.kill()
        with child:
            child.wait()


def _ask(child: subprocess.Popen[bytes], job: bytes) -> bytes:
    """Give a child a job and wait for its answer; empty when it has ended."""
    assert child.stdin is not None and child.stdout is not None
    try:
        child.stdin.write(job + b"\n")
    except BrokenPipeError:
        return b""
    return child.stdout.readline()
