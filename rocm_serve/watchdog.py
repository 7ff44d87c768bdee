"""Who is stuck: a rank that owes progress and has made none for too long. Pure: time is given.

Being slow is not being stuck: every layer of every step counts. Being idle is not being stuck: nothing is owed. A rank
that waits for others is to blame only when nobody else is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rocm_serve.messages import RankBeat

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

    def look(self, beats: Iterable[RankBeat], submitted: int, now: float) -> list[Stuck]:
        """Take a look at everybody; return who is stuck, the likeliest culprit first, or nobody.

        `submitted` is the last plan that the core has sent: a rank that has not begun it owes that.
        """
        owing = []
        for beat in beats:
            owes = beat.owes or beat.step < submitted
            if not owes or beat.count != self._count.get(beat.rank):
                self._since[beat.rank] = now
            self._count[beat.rank] = beat.count
            if owes:
                owing.append(Stuck(beat, now - self._since[beat.rank]))
        late = [one for one in owing if one.seconds >= self._timeout_s]
        if not any(not one.beat.waiting for one in late) and len(late) < len(owing):
            return []  # those that wait, wait for somebody who moves
        if not late:
            return []
        together = [one for one in owing if one.seconds >= self._timeout_s - _TOGETHER_S]
        return sorted(together, key=lambda one: (not one.beat.stopped, one.beat.waiting, -one.seconds))
