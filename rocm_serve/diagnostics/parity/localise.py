"""Where two recorded runs first part: in the order of the computation, by layer, op and rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec
import numpy as np

from rocm_serve.diagnostics.parity.drive import RUN_SEEDS
from rocm_serve.diagnostics.parity.judge import FP8_ROWS
from rocm_serve.diagnostics.parity.tap_files import Array, Site, read_taps

# Relative size from which a site counts as different: well above what another order of sums does to it, which
# is some 1e-6 in float32 and one rounding, 4e-3, in bf16, a few times over the layers.
DIFFERS = {"float32": 3e-4, "bfloat16": 3e-2, FP8_ROWS: 3e-2}
NEAR_TIE = {"float32": 1e-4, "bfloat16": 2e-2, FP8_ROWS: 2e-2}  # of router logits
_FLOOR = {"float32": 1e-6, "bfloat16": 4e-3, FP8_ROWS: 4e-3}
_SMALL = 0.1  # of the longest row at a site: a row that happens to be near zero is held against this
_LOGIT_SCALE = 30.0  # log-probs move by at most about this much times the relative change of the last hidden row
_GATE, _ROUTE = "mlp.gate.linear", "mlp.moe_route"

Vector = np.ndarray[tuple[int], np.dtype[np.float32]]
Key = tuple[int, int]  # (seed of the request, position)


class Share(msgspec.Struct):
    """One row of one site on one rank."""

    rank: int
    tp_rank: int
    site: Site
    row: Vector


class Recorded:
    """A run's files, by layer and site, in the order of the computation."""

    def __init__(self, folder: Path, run: int) -> None:
        self.shares: dict[tuple[int, str], dict[Key, list[Share]]] = {}
        self._order: dict[tuple[int, str], int] = {}
        for header, tensors in read_taps(folder):
            for number, (site, values) in enumerate(zip(header.sites, tensors, strict=True)):
                where = (site.layer, site.name)
                self._order[where] = min(number, self._order.get(where, number))
                self._add(where, header.rank, header.tp_rank, site, values, run)

    def _add(self, where: tuple[int, str], rank: int, tp_rank: int, site: Site, values: Array, run: int) -> None:
        for (seed, position), row in zip(site.keys, values, strict=True):
            if seed // RUN_SEEDS == run:
                rows = self.shares.setdefault(where, {}).setdefault((seed % RUN_SEEDS, position), [])
                rows.append(Share(rank, tp_rank, site, row))

    def places(self) -> list[tuple[int, str]]:
        """List (layer, site) in the order of the computation."""
        return sorted(self.shares, key=lambda where: (where[0], self._order[where]))


def whole(shares: list[Share]) -> Vector:
    """Put the shares of the ranks of one stage together."""
    shares = sorted(shares, key=lambda share: share.tp_rank)
    site = shares[0].site
    if site.addend:
        total: Vector = np.sum([share.row for share in shares], axis=0, dtype=np.float32)
        return total
    if not site.bands:
        return shares[0].row
    pieces = [
        share.row[_columns(share.site, number)]
        for number, band in enumerate(site.bands)
        for share in shares
        if share.tp_rank % band.repeat == 0
    ]
    return np.concatenate(pieces)


def share_of(total: Vector, share: Share, ranks: int) -> Vector | None:
    """Cut out of the whole what one rank should hold; None for an addend, which only the sum can be held against."""
    site = share.site
    if site.addend and ranks > 1:
        return None
    if site.addend or not site.bands:
        return total
    pieces, at = [], 0
    for band in site.bands:
        first = at + share.tp_rank // band.repeat * band.width
        pieces.append(total[first : first + band.width])
        at += band.width * (ranks // band.repeat)
    return np.concatenate(pieces)


def _columns(site: Site, number: int) -> slice:
    start = sum(band.width for band in site.bands[:number])
    return slice(start, start + site.bands[number].width)


class Apart(msgspec.Struct):
    """How far two runs lie apart at one site: at the row where it is most, relative to the row's length."""

    layer: int
    site: str
    op: str
    relative: float
    absolute: float
    prompt: int
    position: int
    ranks: tuple[int, ...]  # of A, whose share differs; all that add up where only their sum can be compared


class Divergence(msgspec.Struct):
    """Where they first part. `how` says what made this site the first; `layers` has the worst site of each layer."""

    how: str
    first: Apart | None
    layers: tuple[Apart, ...]


def compare(a: Recorded, b: Recorded, limit: float, ties: Mapping[int, int]) -> Iterator[Apart]:
    """Compare every site that both recorded, in order, leaving out rows from a near tie on."""
    for where in a.places():
        there = b.shares.get(where)
        keys = [
            key
            for key in a.shares[where]
            if there is not None and key in there and key[1] < ties.get(key[0], key[1] + 1)
        ]
        if there is None or not keys:
            continue
        usual = _SMALL * max(_length(whole(there[key])) for key in keys)
        yield max((_apart(where, key, a.shares[where][key], there[key], limit, usual) for key in keys), key=_size)


def _size(apart: Apart) -> float:
    return apart.relative


def _apart(
    where: tuple[int, str], key: Key, mine: list[Share], theirs: list[Share], limit: float, usual: float
) -> Apart:
    one, other = whole(mine), whole(theirs)
    if one.shape != other.shape:
        sentence = f"layer {where[0]}, {where[1]}: {one.size} numbers a row on one side, {other.size} on the other"
        raise AssertionError(sentence)
    worst, ranks = relative(one, other, usual), []
    for share in mine:
        expected = share_of(other, share, len(mine))
        apart = worst if expected is None else relative(share.row, expected, usual)
        worst = max(worst, apart)
        if apart > limit:
            ranks.append(share.rank)
    absolute = float(np.abs(one.astype(np.float64) - other).max(initial=0.0))
    return Apart(where[0], where[1], mine[0].site.op, worst, absolute, key[0], key[1], tuple(sorted(ranks)))


def relative(one: Vector, other: Vector, usual: float = 0.0) -> float:
    """Return the length of the difference over the greater length, at least `usual`.

    NaN and infinity count as wholly different.
    """
    a, b = one.astype(np.float64), other.astype(np.float64)
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return float("inf")
    length = max(_length(one), _length(other), usual)
    return 0.0 if length == 0 else float(np.linalg.norm(a - b)) / length


def _length(row: Vector) -> float:
    found = float(np.linalg.norm(row.astype(np.float64)))
    return found if np.isfinite(found) else 0.0


def near_ties(a: Recorded, b: Recorded, dtype: str) -> dict[int, int]:
    """Find, for each prompt, the first row where the sides chose other experts and both choices are right.

    They are when the router's logits agree to within `NEAR_TIE` and the last chosen and the next expert lie no
    further apart than that.
    """
    close = NEAR_TIE[dtype]
    found: dict[int, int] = {}
    for layer in sorted({layer for layer, name in a.shares if name == _ROUTE}):
        routed, there = a.shares[layer, _ROUTE], b.shares.get((layer, _ROUTE), {})
        for key in sorted(routed.keys() & there.keys()):
            one, other = whole(routed[key]), whole(there[key])
            if np.array_equal(one > 0, other > 0):
                continue
            mine, theirs = (whole(run.shares[layer, _GATE][key]) for run in (a, b))
            chosen = int((one > 0).sum())
            ordered = np.sort(mine)[::-1]
            gap = float(ordered[chosen - 1] - ordered[chosen])
            if gap < close and float(np.abs(mine - theirs).max()) < close:
                found[key[0]] = min(key[1], found.get(key[0], key[1]))
    return found


def first_divergence(apart: Iterable[Apart], dtype: str, last_layer: int, worst: float) -> Divergence:
    """Name the first site that differs. `worst`: the largest difference of log-probs that has to be explained."""
    sites = list(apart)
    by_layer: dict[int, Apart] = {}
    for one in sites:
        if one.layer not in by_layer or one.relative > by_layer[one.layer].relative:
            by_layer[one.layer] = one
    layers = tuple(by_layer[layer] for layer in sorted(by_layer))
    limit = DIFFERS[dtype]
    for one in sites:
        if one.relative > limit:
            return Divergence(f"the first to differ by more than {limit:g} of its size", one, layers)
    at_end = [one.relative for one in sites if one.layer == last_layer]
    if at_end and worst > _LOGIT_SCALE * max(*at_end, _FLOOR[dtype]):
        return Divergence("every site up to the last norm agrees: lm_head, or the log-probs made of it", None, layers)
    return Divergence(
        f"none differs by more than {limit:g}: the site of the largest step", _steepest(sites, dtype), layers
    )


def _steepest(sites: list[Apart], dtype: str) -> Apart | None:
    before, best, found = _FLOOR[dtype], 0.0, None
    for one in sites:
        if one.relative / before > best:
            best, found = one.relative / before, one
        before = max(before, one.relative)
    return found
