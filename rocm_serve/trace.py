"""Step traces: what each step held and when, one JSON array a line. A leaf.

Times are time.monotonic_ns(), which all processes of a host share.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TypeVar

import msgspec

log = logging.getLogger(__name__)


class StepTrace(msgspec.Struct, frozen=True, array_like=True):
    """One finished step, as the core sees it."""

    seq: int
    num_works: int
    num_recurrent: int  # works with output rows
    in_flight: int  # plans in flight when it was submitted, itself included
    submitted_ns: int
    committed_ns: int


class StageTrace(msgspec.Struct, frozen=True, array_like=True):
    """One step on one rank: from its rows being there to its own rows, or its result, being on their way."""

    seq: int
    num_works: int
    started_ns: int
    ended_ns: int


Step = TypeVar("Step", StepTrace, StageTrace)


def trace_writer(file: IO[bytes]) -> Callable[[StepTrace | StageTrace], None]:
    """Return a function that appends one step to `file`, which is not buffered: closing it has nothing to write.

    A file that takes no more (a full disk) ends the trace with a line in the log, and nothing else.
    """
    encoder = msgspec.json.Encoder()
    ended = False

    def write(step: StepTrace | StageTrace) -> None:
        nonlocal ended
        if ended:
            return
        line = encoder.encode(step) + b"\n"
        why = "only part of a line was taken"
        try:
            ended = file.write(line) < len(line)
        except OSError as error:
            ended, why = True, str(error.strerror)
        if ended:
            log.warning("--trace: %s ends at step %d: %s", file.name, step.seq, why)

    return write


@contextmanager
def tracing(folder: str | None, name: str) -> Iterator[Callable[[StepTrace | StageTrace], None] | None]:
    """Open `folder/name.jsonl` for the steps of one process; yields None when no folder is given."""
    if folder is None:
        yield None
        return
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    with (path / f"{name}.jsonl").open("wb", buffering=0) as file:
        yield trace_writer(file)


def read_trace(path: Path, kind: type[Step]) -> list[Step]:
    """Read back the whole lines of one file.

    A last line without an end, as a process that was killed leaves it, is left out and told in the log.
    Errors: msgspec.DecodeError for any other line that is no step.
    """
    *lines, cut = path.read_bytes().split(b"\n")
    if cut:
        log.warning("%s: the last line was cut after %d bytes and is left out", path, len(cut))
    return [msgspec.json.decode(line, type=kind) for line in lines]
