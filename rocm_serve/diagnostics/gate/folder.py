"""The folder of a gate: one subfolder a run, and which of them an interrupted run may be continued in."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

import msgspec

from rocm_serve.diagnostics.gate.server import Identity, Metrics
from rocm_serve.errors import UserError

BEGUN, DONE, JOURNAL = "run.json", "result.json", "answers.jsonl"
LOCK = "held"  # the kernel frees it however its holder ends


class Begun(msgspec.Struct, frozen=True, kw_only=True):
    """What a run was begun with. It may be continued with the same protocol, data and server, and with no other."""

    protocol_sha256: str
    data_sha256: dict[str, str]
    questions: int
    base_url: str
    identity: Identity
    metrics: Metrics  # of the server, before the first question
    at: str  # UTC

    def differs(self, other: Begun) -> str | None:
        """Name what keeps `other` from continuing this, or None."""
        names = {
            "protocol_sha256": "the reference has another protocol",
            "data_sha256": "the data differ",
            "questions": "it asked another number of questions",
            "base_url": "it asked another server",
            "identity": "the server was restarted or changed",
        }
        return next((why for name, why in names.items() if getattr(self, name) != getattr(other, name)), None)


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def check_out(out: Path) -> None:
    """Refuse a folder that can be neither made nor written to, and make nothing yet. Errors: UserError."""
    try:
        there = next(path for path in (out, *out.parents) if os.path.lexists(path))
        if not there.is_dir():
            raise UserError(f"--out {out}: Not a directory" + (f": {there}" if there != out else ""))
    except OSError as error:
        raise UserError(f"--out {out}: {error.strerror}") from None
    if not os.access(there, os.W_OK | os.X_OK):
        raise UserError(f"--out {out}: {there} cannot be written to")


class Held:
    """A folder that is this gate's for as long as it runs."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self.says("")

    def says(self, run: str) -> None:
        """Leave for other gates which process works in which run."""
        self._file.seek(0)
        self._file.truncate()
        self._file.write(f"{os.getpid()} {run}")
        self._file.flush()


@contextmanager
def held(out: Path) -> Iterator[Held]:
    """Keep other gates out of a folder. Errors: UserError that names the one that is running there."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        file = (out / LOCK).open("a+", encoding="utf-8")
    except OSError as error:
        raise UserError(f"--out {out}: {error.strerror}") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            pid, _, run = file.read().partition(" ")
            raise UserError(
                f"a gate is running in {out / run} (pid {pid or 'unknown'}); --out takes another folder"
            ) from None
        except OSError as error:
            raise UserError(f"--out {out} cannot be locked: {error.strerror}; --out takes another folder") from None
        yield Held(file)


def open_run(out: Path, begun: Begun, *, fresh: bool) -> tuple[Path, Begun, list[str]]:
    """Continue the newest run that did not come to its end, else begin one.

    Returns its folder, what it was begun with, and lines about that for the user. Errors: UserError.
    """
    notes = []
    try:
        out.mkdir(parents=True, exist_ok=True)
        for folder in [] if fresh else sorted(out.glob("run-*"), reverse=True)[:1]:
            if (folder / DONE).exists() or not (folder / BEGUN).is_file():
                continue
            earlier = _read(folder / BEGUN)
            why = earlier.differs(begun)
            if why is None:
                return folder, earlier, [f"continues {folder}, begun {earlier.at}"]
            notes.append(f"{folder} is not continued: {why}")
        number = 1 + max((int(path.name[4:]) for path in out.glob("run-*") if path.name[4:].isdigit()), default=0)
        folder = out / f"run-{number:03d}"
        folder.mkdir()
        whole = folder / f"{BEGUN}.new"
        whole.write_bytes(msgspec.json.format(msgspec.json.encode(begun), indent=1))
        whole.replace(folder / BEGUN)
    except OSError as error:
        raise UserError(f"--out {out}: {error.strerror}") from None
    return folder, begun, notes


def _read(path: Path) -> Begun:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Begun)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {error}; --fresh begins a new run") from None
