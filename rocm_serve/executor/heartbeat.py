"""Signs of progress of one process, in a small file that its supervisor reads. No torch.

The loop that does the work counts; there is no thread that could go on beating while the loop is stuck. A beat is one
write into mapped memory, well under a microsecond. Readers may see a beat half written; the next look is soon.
"""

from __future__ import annotations

import mmap
import struct
from enum import IntEnum
from pathlib import Path
from typing import Final, NamedTuple

_FORMAT: Final = struct.Struct("<QqqB")  # count, step, layer, phase


class Phase(IntEnum):
    """Where a process is."""

    STARTING = 0
    JOINING = 1
    LOADING = 2
    LOADED = 3
    ALLOCATING = 4
    WARMING_UP = 5
    IDLE = 6
    PREFILL = 7
    DECODE = 8
    MIXED = 9
    WAITING_FOR_ROWS = 10
    REPORTING = 11
    WAITING_FOR_TOKENS = 12

    @property
    def words(self) -> str:
        return _WORDS[self]

    @property
    def waits_for_others(self) -> bool:
        """Making no progress here is another rank's fault."""
        return self in (Phase.LOADED, Phase.WAITING_FOR_ROWS, Phase.WAITING_FOR_TOKENS)


_WORDS: Final = {
    Phase.STARTING: "starting",
    Phase.JOINING: "joining the other ranks",
    Phase.LOADING: "loading",
    Phase.LOADED: "waiting for the other ranks to load",
    Phase.ALLOCATING: "allocating caches",
    Phase.WARMING_UP: "warming up",
    Phase.IDLE: "serving, idle",
    Phase.PREFILL: "prefill",
    Phase.DECODE: "decode",
    Phase.MIXED: "prefill and decode",
    Phase.WAITING_FOR_ROWS: "waiting for the previous stage's rows",
    Phase.REPORTING: "sampling and reporting",
    Phase.WAITING_FOR_TOKENS: "waiting for the last stage's tokens",
}


_OF_STEPS: Final = (
    *(Phase.PREFILL, Phase.DECODE, Phase.MIXED, Phase.REPORTING),
    *(Phase.WAITING_FOR_ROWS, Phase.WAITING_FOR_TOKENS),
)


class Progress(NamedTuple):
    """One look at a process. `step` is the last plan it began (the core: it has sent), `layer` the one it is in."""

    beats: int
    step: int
    layer: int
    phase: Phase

    @property
    def words(self) -> str:
        """Name the phase; work before the first plan is that of warming up."""
        if self.step < 0 and self.phase in _OF_STEPS:
            return f"{Phase.WARMING_UP.words}: {self.phase.words}"
        return self.phase.words

    def where(self) -> str:
        """Say it for people."""
        layer = f", layer {self.layer}" if self.layer >= 0 else ""
        return f"step {self.step}{layer} ({self.words})" if self.step >= 0 else self.words + layer


class Heartbeat:
    """The beating end. With no path nobody looks, and beating costs the same."""

    def __init__(self, path: Path | None = None) -> None:
        self._view: mmap.mmap | bytearray = bytearray(_FORMAT.size) if path is None else _map(path)
        self._count = 0
        self._step = -1
        self._layer = -1
        self._phase = Phase.STARTING
        self._write()

    def enter(self, phase: Phase, step: int | None = None) -> None:
        """Begin a phase, of another step if one is given; outside every layer."""
        self._phase = phase
        self._layer = -1
        if step is not None:
            self._step = step
        self._write()

    def layer(self, layer: int) -> None:
        """Begin a layer."""
        self._layer = layer
        self._write()

    def tick(self) -> None:
        """Say that something has moved."""
        self._write()

    @property
    def progress(self) -> Progress:
        return _read(self._view)

    def _write(self) -> None:
        self._count += 1
        _FORMAT.pack_into(self._view, 0, self._count, self._step, self._layer, self._phase)


def read_progress(path: Path) -> Progress:
    """Look at a process; one that has not begun yet is starting."""
    data = path.read_bytes()
    return _read(data) if len(data) == _FORMAT.size else Progress(0, -1, -1, Phase.STARTING)


def heartbeat_file(run_dir: str, name: str) -> Path:
    """Name the file of "core", "rank-0" and so on."""
    return Path(run_dir) / f"{name}.beat"


def _map(path: Path) -> mmap.mmap:
    with path.open("wb+") as file:
        file.write(bytes(_FORMAT.size))
        file.flush()
        return mmap.mmap(file.fileno(), _FORMAT.size)


def _read(view: mmap.mmap | bytearray | bytes) -> Progress:
    count, step, layer, phase = _FORMAT.unpack_from(view)
    return Progress(count, step, layer, Phase(phase) if phase in _WORDS else Phase.STARTING)
