"""Try every candidate of every kernel at a model's shapes, judge and time it, and keep what wins.

Candidates are compiled by other processes; one process launches, judges and times, group after group, in the order of
what matters. A winner that beats the rule by less than noise is not kept: rules are easier to read than tables.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotCompiled
from dataclasses import dataclass, field, replace
from statistics import geometric_mean

import torch

from rocm_serve.ops import tiles
from rocm_serve.ops.tiles import Tile
from rocm_serve.tuning.bench import Asked, Bench, candidates, make, op_of
from rocm_serve.tuning.cases import Case
from rocm_serve.tuning.outcome import Outcome, Tried
from rocm_serve.tuning.timing import replayed, time_calls
from rocm_serve.tuning.wish import Point

log = logging.getLogger(__name__)

LEAST_GAIN = 1.02
_AGAIN = 3  # of the fastest, timed once more beside the rule's


Timer = Callable[[Case], float]  # microseconds of one call


@dataclass(slots=True)
class Group:
    """One kernel at one shape, the calls that ask for it, and its candidates, the rule's tile first."""

    asked: Asked
    points: list[Point] = field(default_factory=list)
    tiles: list[Tile] = field(default_factory=list)
    compiled: list[Future[str] | None] = field(default_factory=list)

    @property
    def key(self) -> tuple[str, str]:
        return self.asked[0], tiles.shape_key(self.asked[1])


def groups_of(todo: Sequence[Point], seen: dict[int, list[Asked]], arch: str) -> list[Group]:
    """Put calls together that ask for the same tile; groups of one candidate have nothing to choose."""
    found: dict[tuple[str, str], Group] = {}
    for i, asked in seen.items():
        for one in asked:
            group = Group(one)
            found.setdefault(group.key, group).points.append(todo[i])
    for group in found.values():
        group.tiles = candidates(group.asked, arch)
    return [group for group in found.values() if len(group.tiles) > 1]


def gpu_timer(device: torch.device) -> Timer:
    """Return a timer by replays of graphs."""
    return lambda case: time_calls(case.calls, device, replays=5).median


@torch.inference_mode()
def tune_group(bench: Bench, group: Group, timer: Timer, deadline: float, patience_s: float = 120.0) -> Outcome:
    """Judge and time the candidates of one group until the deadline (of time.monotonic), the rule's first.

    Errors: TimeoutError when the first has not been compiled after `patience_s`.
    """
    kernel, key = group.key
    made = [make(bench, point) for point in group.points]
    first = group.points[0]
    limit = bench.limit(op_of(first), int(first.arguments["rows"]))
    tried: list[Tried] = []
    for tile, future in zip(group.tiles, group.compiled or [None] * len(group.tiles), strict=True):
        if tried and time.monotonic() > deadline:
            break
        try:
            why = "" if future is None else future.result(timeout=patience_s)
        except NotCompiled:
            if not tried:
                raise
            break
        tried.append(Tried(tile, why=f"not compiled: {why}") if why else _try(kernel, tile, made, timer, limit))
    fine = sorted((one for one in tried if one.us is not None), key=lambda one: one.score)
    finals = {place: tried[place] for place in (0, *(tried.index(one) for one in fine[:_AGAIN]))}
    for place, one in finals.items():
        if one.us is not None:
            finals[place] = _try(kernel, one.tile, made, timer, limit, bench.device)
            if finals[place].us is None:
                tried[place] = finals[place]
    rule = tried[0] if tried[0].us is None else min(tried[0], finals[0], key=lambda one: one.score)
    best = min((one for one in finals.values() if one.us is not None), key=lambda one: one.score, default=rule)
    peers = _peers(made[0], timer)
    return Outcome(
        kernel=kernel,
        key=key,
        calls=tuple(map(str, group.points)),
        rule=rule,
        best=best,
        tried=tuple(tried),
        candidates=len(group.tiles),
        nbytes=tuple(case.cost.nbytes for case in made),
        operations=tuple(case.cost.bf16 + case.cost.fp8 for case in made),
        peers=peers,
    )


def _peers(case: Case, timer: Timer) -> dict[str, float]:
    """Time what others have for the same call; what cannot do it is left out."""
    found: dict[str, float] = {}
    for name, calls in case.peers.items():
        try:
            calls[0]()
            found[name] = timer(replace(case, calls=calls))
        except Exception as error:  # another library's kernel need not have this size
            log.info("%s cannot do %s %s: %s", name, case.op, case.what, error)
    return found


def _try(
    kernel: str,
    tile: Tile,
    made: Sequence[Case],
    timer: Timer,
    limit: float,
    thorough: torch.device | None = None,
) -> Tried:
    """Judge one tile in every call, then time it. Whatever a tile does wrong is its result.

    `thorough`: a device where cut rows are judged too, and what replays of a graph make.
    """
    try:
        with tiles.forced(kernel, tile):
            error = 0.0
            for case in made:
                for call in case.calls[:2]:
                    call()
                error = max(error, case.check())
                if thorough is not None and case.check_cut is not None:
                    error = max(error, case.check_cut())
            if not error <= limit:
                return Tried(tile, error=error, why=f"wrong: relative L2 {error:.1e}")
            us = tuple(timer(case) for case in made)
            if thorough is not None and not all(_same_replayed(case, thorough) for case in made if case.pure):
                return Tried(tile, error=error, why="wrong: other bits in a replay of a graph")
    except Exception as error_:  # of any kind: too much shared memory, a launch that fails, an assertion of the op
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # a GPU that can no longer be used ends the run here
        return Tried(tile, why=f"{type(error_).__name__}: {error_}".splitlines()[0][:200])
    return Tried(tile, us=us, error=error, score=geometric_mean(us))


def _same_replayed(case: Case, device: torch.device) -> bool:
    """Say whether replays of a graph of all calls make the bits that calls make one by one."""
    pairs = zip((call() for call in case.calls), replayed(case.calls, device), strict=True)
    return all(
        torch.equal(a, b)
        for one, again in pairs
        for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (one, again)), strict=True)
    )
