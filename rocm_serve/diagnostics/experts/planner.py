"""Where experts had better be, by how often each was chosen: copies of the hottest, then the largest first. Pure.

Letters: E experts, R copies beyond one of each, P = E + R slots. A load is a count of (token, choice) pairs; the
copies of an expert share its load equally. Loads are whole numbers of a unit that every number of copies divides, so
that sums are exact and the same counts always give the same placement.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

from rocm_serve.errors import UserError

Item = tuple[int, int]  # load of one copy, expert


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """Slots of one layer, rank by rank, and the load of each rank: with experts in order, and with these slots.

    `plain` is empty where the experts cannot be shared equally without copies.
    """

    slots: tuple[int, ...]
    plain: tuple[float, ...]
    planned: tuple[float, ...]

    @property
    def copies(self) -> int:
        """Slots beyond one of each expert."""
        return len(self.slots) - len(set(self.slots))


def imbalance(loads: Sequence[float]) -> float:
    """Return the load of the busiest rank over the mean; 1 is even. 1, too, where nothing was counted."""
    total = sum(loads)
    return max(loads) * len(loads) / total if total else 1.0


def check_redundant(experts: int, ep: int, redundant: int) -> None:
    """Refuse slots that cannot be shared equally. Errors: UserError naming what can."""
    if ep < 1 or redundant < 0:
        raise UserError(f"--ep {ep} --redundant {redundant}: legal: --ep 1 or more, --redundant 0 or more")
    least, most = -experts % ep, experts * (ep - 1)
    if (experts + redundant) % ep or redundant > most:
        legal = [least + n * ep for n in range(3) if least + n * ep <= most]
        more = f", .. {most}" if legal[-1] < most else ""
        raise UserError(
            f"--redundant {redundant}: {experts} experts and {redundant} copies cannot be shared by --ep {ep} equally,"
            f" no expert twice on a rank; legal: {', '.join(map(str, legal))}{more}"
        )


def plan_layer(chosen: Sequence[int], ep: int, redundant: int) -> LayerPlan:
    """Place the experts of one layer, at most `redundant` of them again.

    A rank holds no expert twice. The busiest rank is never busier than with experts in order, and a layer that copies
    do not help gets none. Errors: UserError as `check_redundant`.
    """
    experts = len(chosen)
    check_redundant(experts, ep, redundant)
    unit = lcm(*range(1, min(ep, redundant + 1) + 1))
    choices: list[list[list[Item]]] = []
    plain: list[list[Item]] = []
    if experts % ep == 0:
        each = experts // ep
        single = [(load * unit, expert) for expert, load in enumerate(chosen)]
        plain = [single[rank * each : (rank + 1) * each] for rank in range(ep)]
        choices += [plain, pack(single, ep)]
    if redundant or not choices:
        choices.append(pack(_replicate(chosen, ep, redundant, unit), ep))
    best = min(choices, key=lambda ranks: (max(_loads(ranks)), sum(map(len, ranks))))  # the first of equals
    slots = tuple(expert for rank in best for expert in sorted(expert for _, expert in rank))
    before, after = ([load / unit for load in _loads(ranks)] for ranks in (plain, best))
    return LayerPlan(slots, tuple(before), tuple(after))


def _loads(ranks: Sequence[Sequence[Item]]) -> list[int]:
    return [sum(load for load, _ in rank) for rank in ranks]


def _replicate(chosen: Sequence[int], ep: int, redundant: int, unit: int) -> list[Item]:
    """Copy, again and again, the expert whose copies are hottest; one for each rank is the most."""
    copies = [1] * len(chosen)
    heap = [(-load * unit, expert) for expert, load in enumerate(chosen)]
    heapq.heapify(heap)
    for _ in range(redundant):
        _, expert = heapq.heappop(heap)
        copies[expert] += 1
        if copies[expert] < ep:
            heapq.heappush(heap, (-chosen[expert] * unit // copies[expert], expert))
    return [(load * unit // copies[e], e) for e, load in enumerate(chosen) for _ in range(copies[e])]


def pack(items: Sequence[Item], ep: int) -> list[list[Item]]:
    """Give the largest first to the rank with the least load that has a slot and not that expert.

    Items are (load, expert), as many as `ep` divides, an expert at most `ep` times: then no rank gets it twice.
    """
    each = len(items) // ep
    ranks: list[list[Item]] = [[] for _ in range(ep)]
    held: list[set[int]] = [set() for _ in range(ep)]
    loads = [0] * ep
    for load, expert in sorted(items, key=lambda item: (-item[0], item[1])):
        free = [rank for rank in range(ep) if len(ranks[rank]) < each]
        fit = [rank for rank in free if expert not in held[rank]]
        to = min(fit or free, key=lambda rank: (loads[rank], rank))
        if not fit:
            load, expert = _make_way((load, expert), to, ranks, held, loads)
        ranks[to].append((load, expert))
        held[to].add(expert)
        loads[to] += load
    return ranks


def _make_way(item: Item, to: int, ranks: list[list[Item]], held: list[set[int]], loads: list[int]) -> Item:
    """Put `item` on a full rank, and return what it takes the place of, for rank `to`, which has that expert already.

    There is one: some rank lacks the expert, as it has at most one copy for each; that rank is full, of experts that
    are all different, and `to` is not, so that one of them is not on `to`.
    """
    load, expert = item
    swaps = [
        (max(loads[to] + other, loads[rank] - other + load), rank, place)
        for rank in range(len(ranks))
        if expert not in held[rank]
        for place, (other, moved) in enumerate(ranks[rank])
        if moved not in held[to]
    ]
    _, rank, place = min(swaps)
    other = ranks[rank][place]
    ranks[rank][place] = item
    held[rank] = held[rank] - {other[1]} | {expert}
    loads[rank] += load - other[0]
    return other
