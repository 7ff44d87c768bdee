"""Stop strings on a stream of text, whatever the cuts between its parts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StopStep:
    """`text` may be shown. `matched` is the stop string that ended the stream, if one did."""

    text: str
    matched: str | None = None


class StopMatcher:
    """Search a growing text for stop strings, keeping back only what may still become one.

    The match that is complete first wins, as if the text came character by character; of two that are complete at
    once, the longer. So the outcome depends on the text alone, not on how it was cut.
    """

    def __init__(self, stops: tuple[str, ...], *, include_stop_text: bool = False) -> None:
        assert all(stops), "an empty stop string matches everywhere"
        self._stops = stops
        self._include = include_stop_text
        self._firsts = frozenset(stop[0] for stop in stops)
        self._longest = max((len(stop) for stop in stops), default=0)
        self._held = ""

    @property
    def holds_text(self) -> bool:
        return bool(self._held)

    def feed(self, text: str, *, armed: bool = True) -> StopStep:
        """Take the next part of the text. Not `armed`: a match that ends in this part does not count (min_tokens)."""
        if not self._stops:
            return StopStep(text)
        buffer = self._held + text
        if armed and text:
            end, start, matched = self._first_match(buffer)
            if matched is not None:
                self._held = ""
                return StopStep(buffer[: end if self._include else start], matched)
        keep_from = self._possible_start(buffer)
        self._held = buffer[keep_from:]
        return StopStep(buffer[:keep_from])

    def flush(self) -> str:
        """Return the kept text: the stream is over, it did not become a stop string."""
        text, self._held = self._held, ""
        return text

    def _first_match(self, buffer: str) -> tuple[int, int, str | None]:
        """Return end, start and stop string of the match that is complete first, among those ending in new text."""
        best: tuple[int, int, str | None] = (len(buffer) + 1, 0, None)
        for stop in self._stops:
            start = buffer.find(stop, max(0, len(self._held) - len(stop) + 1))
            if start >= 0:
                best = min(best, (start + len(stop), start, stop), key=lambda match: match[:2])
        return best

    def _possible_start(self, buffer: str) -> int:
        """Return where the longest end of `buffer` begins that is a beginning of a stop string."""
        for start in range(max(0, len(buffer) - self._longest + 1), len(buffer)):
            if buffer[start] in self._firsts:
                tail = buffer[start:]
                if any(stop.startswith(tail) and stop != tail for stop in self._stops):
                    return start
        return len(buffer)
