"""Who is stuck: a rank that owes progress and has made none for too long. `Watch` is pure: time is given.

Being slow is not being stuck: every layer of every step counts. Being idle is not being stuck: nothing is owed. A rank
that waits for others is to blame only when nobody else is.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from rocm_serve.executor.heartbeat import Heartbeat, Phase, Progress
from rocm_serve.messages import RankBeat

BEAT_S: Final = 0.5
# Idle ranks owe what has been sent; those that start or join have --dist-timeout, which torch keeps.
_OWE_NOTHING: Final = (Phase.IDLE, Phase.STARTING, Phase.JOINING)
_TOGETHER_S = 2.0  # ranks that stopped moving within this time of each other are named together


@dataclass(frozen=True, slots=True)
class Stuck:
    """A rank that makes no progress, and for how long."""

    beat: RankBeat
    seconds: float

    def sentence(self) -> str:
        beat = self.beat
        layer = f", layer {beat.layer}" if beat.layer >= 0 else ""
        where = f"step {beat.step}{layer} ({beat.phase})" if beat.step >= 0 else beat.phase + layer
        stopped = ", stopped by a signal" if beat.stopped else ""
        who = f"rank {beat.rank}" if beat.rank >= 0 else "the engine core"
        return f"{who} has made no progress for {self.seconds:.0f} s: {where}{stopped}"


class Watch:
    """Remembers since when each rank stands still while it owes progress."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._count: dict[int, int] = {}
        self._since: dict[int, float] = {}
        self._moved = 0.0  # when anybody last did

    def look(self, beats: Iterable[RankBeat], submitted: int, now: float) -> list[Stuck]:
        """Take a look at everybody; return who is stuck, the likeliest culprit first, or nobody.

        `submitted` is the last plan that the core has sent: a rank that has not begun it owes that.
        """
        owing = []
        for beat in beats:
            owes = beat.owes or beat.step < submitted
            moved = beat.count != self._count.get(beat.rank)
            if moved:
                self._moved = now
            if moved or not owes:
                self._since[beat.rank] = now
            self._count[beat.rank] = beat.count
            if owes:
                owing.append(beat)
        return self._stuck([Stuck(beat, now - self._stands_since(beat)) for beat in owing])

    def _stands_since(self, beat: RankBeat) -> float:
        """Whoever waits stands still only as long as nobody moves: what it waited for may be on its way to it."""
        since = self._since[beat.rank]
        return max(since, self._moved) if _merely_waits(beat) else since

    def _stuck(self, owing: list[Stuck]) -> list[Stuck]:
        late = [one for one in owing if one.seconds >= self._timeout_s]
        if all(_merely_waits(one.beat) for one in late) and len(late) < len(owing):
            return []  # those that wait, wait for somebody who moves
        if not late:
            return []
        together = [one for one in owing if one.seconds >= self._timeout_s - _TOGETHER_S]
        return sorted(together, key=lambda one: (not one.beat.stopped, one.beat.waiting, -one.seconds))


def _merely_waits(beat: RankBeat) -> bool:
    return beat.waiting and not beat.stopped


def rank_beat(rank: int, seen: Progress, *, stopped: bool = False) -> RankBeat:
    """Put one look at a rank into words for its supervisor and others."""
    return RankBeat(
        rank=rank,
        count=seen.beats,
        phase=seen.words,
        step=seen.step,
        layer=seen.layer,
        owes=seen.phase not in _OWE_NOTHING,
        waiting=seen.phase.waits_for_others,
        stopped=stopped,
    )


class InProcessWatch(threading.Thread):
    """Watches the one rank that shares this process; `on_stuck` is called once, with the sentence."""

    def __init__(self, heartbeat: Heartbeat, timeout_s: float, on_stuck: Callable[[str], None]) -> None:
        super().__init__(name="watchdog", daemon=True)
        self._heartbeat = heartbeat
        self._watch = Watch(timeout_s)
        self._on_stuck = on_stuck
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.wait(BEAT_S):
            stuck = self._watch.look([rank_beat(0, self._heartbeat.progress)], -1, time.monotonic())
            if stuck:
                self._on_stuck(stuck[0].sentence())
                return

    def end(self) -> None:
        """Stop watching."""
        self._over.set()
