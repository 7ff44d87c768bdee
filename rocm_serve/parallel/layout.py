"""Where every element of a weight lives: one table read by constructors, loader, memory planner and tests.

Pure: no torch, no process groups, no I/O.

A parameter is a box whose dimensions are made of bands. A band is a run of one dimension that is cut on its own
(q, k and v of a fused projection are three bands of dimension 0). A part says which checkpoint tensor fills which
bands, and where in that tensor the fill begins.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from math import gcd, prod
from typing import Literal

from rocm_serve.errors import UserError

ParamDtype = Literal["model", "float32", "fp8"]


class Axis(StrEnum):
    """Mesh axes over which a weight can be cut."""

    TP = "tp"
    EP = "ep"


@dataclass(frozen=True, slots=True)
class Place:
    """Where one rank stands on each axis that cuts weights."""

    tp: int = 1
    tp_rank: int = 0
    ep: int = 1
    ep_rank: int = 0

    def on(self, axis: Axis) -> tuple[int, int]:
        """Return (degree, own index) on `axis`."""
        return (self.tp, self.tp_rank) if axis is Axis.TP else (self.ep, self.ep_rank)


@dataclass(frozen=True, slots=True)
class Split:
    """Cut a band over `axis` in `units` pieces that must stay whole (heads, experts, 128-wide scale blocks).

    `what` names the units for people. With more ranks than units and `repeat`, `degree // units` neighbouring
    ranks hold the same unit (KV heads). A dimension that is summed over afterwards must not repeat: it would
    count twice.
    """

    units: int
    what: str
    axis: Axis = Axis.TP
    repeat: bool = False

    def allows(self, degree: int) -> bool:
        return self.units % degree == 0 or (self.repeat and degree % self.units == 0)

    def owned(self, degree: int, index: int) -> range:
        """Return the units that rank `index` of `degree` holds.

        Errors: UserError naming the legal degrees of this split.
        """
        assert 0 <= index < degree
        if self.units % degree == 0:
            count = self.units // degree
            return range(index * count, (index + 1) * count)
        if self.repeat and degree % self.units == 0:
            unit = index * self.units // degree
            return range(unit, unit + 1)
        raise UserError(refusal(self.axis, degree, (self,)))


@dataclass(frozen=True, slots=True)
class Band:
    """A run of `size` elements of one dimension, cut by `split` (None: every rank holds all of it)."""

    size: int
    split: Split | None = None

    def owned(self, place: Place) -> range:
        """Return the elements of this band that the rank at `place` holds."""
        if self.split is None:
            return range(self.size)
        assert self.size % self.split.units == 0, f"{self.size} elements are not {self.split.units} {self.split.what}"
        units = self.split.owned(*place.on(self.split.axis))
        width = self.size // self.split.units
        return range(units.start * width, units.stop * width)


@dataclass(frozen=True, slots=True)
class Part:
    """A slab of checkpoint tensor `key` that fills the parameter's bands `bands` (one index per dimension).

    Shapes: `source` is the whole shape of the checkpoint tensor, `start` the slab's first element in it. With
    `at` the tensor lacks the parameter's first dimension and fills row `at` of it (an expert's own tensor).
    """

    key: str
    source: tuple[int, ...]
    bands: tuple[int, ...]
    start: tuple[int, ...]
    at: int | None = None


@dataclass(frozen=True, slots=True)
class Param:
    """One runtime parameter: a box of bands, and the checkpoint slabs that fill it.

    `dtype`: "model" is the dtype the model runs in, "float32" stays float32, "fp8" is float8_e4m3fn.
    """

    name: str
    dtype: ParamDtype
    dims: tuple[tuple[Band, ...], ...]
    parts: tuple[Part, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape over all ranks."""
        return tuple(sum(band.size for band in bands) for bands in self.dims)

    @property
    def splits(self) -> Iterator[Split]:
        return (band.split for bands in self.dims for band in bands if band.split is not None)


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy checkpoint `key[src]` to the local parameter's `[dst]`.

    With `Part.at` the destination has one dimension (of size 1) more than the source.
    """

    key: str
    src: tuple[slice, ...]
    dst: tuple[slice, ...]

    @property
    def elements(self) -> int:
        return prod(s.stop - s.start for s in self.src)


def copies(param: Param, place: Place) -> Iterator[Copy]:
    """List what the rank at `place` copies to fill its share of `param`, part by part."""
    owned = [[band.owned(place) for band in bands] for bands in param.dims]
    starts = [[sum(len(r) for r in ranges[:i]) for i in range(len(ranges))] for ranges in owned]
    for part in param.parts:
        src, dst = [], []
        lead = 0 if part.at is None else 1
        if part.at is not None:
            rows = owned[0][part.bands[0]]
            if part.at not in rows:
                continue
            row = starts[0][part.bands[0]] + part.at - rows.start
            dst.append(slice(row, row + 1))
        for dim in range(lead, len(param.dims)):
            band = part.bands[dim]
            held, first, offset = owned[dim][band], starts[dim][band], part.start[dim - lead]
            src.append(slice(offset + held.start, offset + held.stop))
            dst.append(slice(first, first + len(held)))
        yield Copy(part.key, tuple(src), tuple(dst))


def shape_at(param: Param, place: Place) -> tuple[int, ...]:
    """Return the shape of the share of `param` that the rank at `place` holds."""
    return tuple(sum(len(band.owned(place)) for band in bands) for bands in param.dims)


def local_shape(param: Param, tp: int, tp_rank: int) -> tuple[int, ...]:
    """Return the shape of the share that tensor-parallel rank `tp_rank` of `tp` holds."""
    return shape_at(param, Place(tp, tp_rank))


def local_bytes(param: Param, tp: int, tp_rank: int, *, model_itemsize: int) -> int:
    """Return the bytes of that share in memory.

    Units: bytes. `model_itemsize` is that of the dtype the model runs in.
    """
    sizes: dict[ParamDtype, int] = {"model": model_itemsize, "float32": 4, "fp8": 1}
    return prod(local_shape(param, tp, tp_rank)) * sizes[param.dtype]


def legal_degrees(splits: Iterable[Split], axis: Axis = Axis.TP) -> tuple[int, ...]:
    """List the degrees at which every split of `axis` leaves its units whole."""
    own = {s for s in splits if s.axis is axis}
    bound = gcd(*(s.units for s in own if not s.repeat)) or max((s.units for s in own), default=1)
    return tuple(d for d in range(1, bound + 1) if all(s.allows(d) for s in own))


def check_degree(splits: Iterable[Split], degree: int, axis: Axis = Axis.TP) -> None:
    """Refuse a degree that would cut a unit.

    Errors: UserError naming what would be cut and the legal degrees.
    """
    own = tuple(dict.fromkeys(s for s in splits if s.axis is axis))
    if degree < 1 or not all(s.allows(degree) for s in own):
        raise UserError(refusal(axis, degree, own))


def refusal(axis: Axis, degree: int, splits: tuple[Split, ...]) -> str:
    """Say in one sentence why `degree` is illegal and which degrees are legal."""
    cut = sorted({f"{s.units} {s.what}" for s in splits if degree < 1 or not s.allows(degree)})
    legal = ", ".join(map(str, legal_degrees(splits, axis)))
    return f"{axis} {degree} cannot be used: it does not divide {' or '.join(cut)}; legal: {legal}"
