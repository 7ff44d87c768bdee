"""Who owns which KV page and which GDN slot. Pure bookkeeping: the memory itself lives in the workers."""

from __future__ import annotations

from collections.abc import Iterable


class Pool:
    """Hand out small integers from a fixed range; the last one given back is the next one given out.

    Serves pages (0..num_pages - 1) and slots (1..num_slots: 0 is the dummy of padded rows). The order is a function
    of the calls alone, so that equal events give equal plans.
    """

    def __init__(self, first: int, count: int) -> None:
        assert count >= 0, count
        self.first = first
        self.count = count
        self._free = list(range(first + count - 1, first - 1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.count - len(self._free)

    def take(self, count: int) -> list[int]:
        """Take `count` ids. The caller has asked `num_free` before."""
        assert 0 <= count <= len(self._free), f"{count} asked, {len(self._free)} free"
        return [self._free.pop() for _ in range(count)]

    def give_back(self, ids: Iterable[int]) -> None:
        self._free.extend(ids)

    def check(self, held: Iterable[int]) -> None:
        """Assert that `held` and the free ids are together every id once."""
        whole = sorted([*held, *self._free])
        assert whole == list(range(self.first, self.first + self.count)), "an id is lost, shared, or free twice"


def pages_for(num_tokens: int, page_size: int) -> int:
    return -(-num_tokens // page_size)
