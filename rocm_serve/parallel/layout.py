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
    EP = "ep"  # which experts
    ETP = "etp"  # which slice of an expert's columns


@dataclass(frozen=True, slots=True)
class Place:
    """Where one rank of a stage stands on each axis that cuts weights.

    `ep` divides `tp`: the tp / ep neighbours that hold the same experts hold a slice of each.
    """

    tp: int = 1
    tp_rank: int = 0
    ep: int = 1

    def __post_init__(self) -> None:
        assert 0 <= self.tp_rank < self.tp and self.tp % self.ep == 0, f"no such place: {self}"

    @property
    def expert_slices(self) -> int:
        """Return in how many slices each expert is cut."""
        return self.tp // self.ep

    @property
    def ep_rank(self) -> int:
        return self.tp_rank // self.expert_slices

    @property
    def expert_slice(self) -> int:
        return self.tp_rank % self.expert_slices

    def on(self, axis: Axis) -> tuple[int, int]:
        """Return (degree, own index) on `axis`."""
        match axis:
            case Axis.TP:
                return self.tp, self.tp_rank
            case Axis.EP:
                return self.ep, self.ep_rank
            case Axis.ETP:
                return self.expert_slices, self.expert_slice


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
    `at` the part fills row `at` of the parameter's first dimension only: with a tensor that lacks that dimension (an
    expert's own), or with row `start[0]` of one that has it (an expert moved to another slot).
    """

    key: str
    source: tuple[int, ...]
    bands: tuple[int, ...]
    start: tuple[int, ...]
    at: int | None = None


@dataclass(frozen=True, slots=True)
class Param:
    """One runtime parameter: a box of bands, and the checkpoint slabs that fill it.

    `dtype`: "model" is the dtype the model runs in, "float32" stays float32, "fp8" is e4m3
    in the dialect of the device.
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

    With a tensor that lacks the parameter's first dimension the destination has one (of size 1) more.
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
        lacking = len(param.dims) - len(part.source)  # 1 for a tensor without the first dimension
        if part.at is not None:
            rows = owned[0][part.bands[0]]
            if part.at not in rows:
                continue
            row = starts[0][part.bands[0]] + part.at - rows.start
            dst.append(slice(row, row + 1))
            src += [] if lacking else [slice(part.start[0], part.start[0] + 1)]
        for dim in range(len(dst), len(param.dims)):
            band = part.bands[dim]
            held, first, offset = owned[dim][band], starts[dim][band], part.start[dim - lacking]
            src.append(slice(offset + held.start, offset + held.stop))
            dst.append(slice(first, first + len(held)))
        yield Copy(part.key, tuple(src), tuple(dst))


def shape_at(param: Param, place: Place) -> tuple[int, ...]:
    """Return the shape of the share of `param` that the rank at `place` holds."""
    return tuple(sum(len(band.owned(place)) for band in bands) for bands in param.dims)


def bytes_at(param: Param, place: Place, *, model_itemsize: int) -> int:
    """Return the bytes of that share in memory.

    Units: bytes. `model_itemsize` is that of the dtype the model runs in.
    """
    sizes: dict[ParamDtype, int] = {"model": model_itemsize, "float32": 4, "fp8": 1}
    return prod(shape_at(param, place)) * sizes[param.dtype]


def legal_degrees(splits: Iterable[Split], axis: Axis = Axis.TP) -> tuple[int, ...]:
    """List the degrees at which every split of `axis` leaves its units whole."""
    own = {s for s in splits if s.axis is axis}
    bound = gcd(*(s.units for s in own if not s.repeat)) or max((s.units for s in own), default=1)
    return tuple(d for d in range(1, bound + 1) if all(s.allows(d) for s in own))


def fits(splits: Iterable[Split], tp: int, ep: int) -> bool:
    """Say whether `tp` ranks of a stage, `ep` of them with other experts each, leave every unit whole."""
    own = set(splits)
    degrees = {Axis.TP: tp, Axis.EP: ep, Axis.ETP: tp // ep}
    experts = ep == 1 or any(s.axis is Axis.EP for s in own)
    return experts and tp % ep == 0 and all(s.allows(degrees[s.axis]) for s in own)


def legal_tp(splits: Iterable[Split], ep: int = 1) -> tuple[int, ...]:
    """List the tensor-parallel degrees that go with `ep`."""
    own = set(splits)
    return tuple(tp for tp in legal_degrees(own) if fits(own, tp, ep))


def legal_ep(splits: Iterable[Split], tp: int) -> tuple[int, ...]:
    """List the expert-parallel degrees that go with `tp`."""
    own = set(splits)
    return tuple(ep for ep in range(1, tp + 1) if fits(own, tp, ep))


def check_degrees(splits: Iterable[Split], tp: int, ep: int = 1) -> None:
    """Refuse degrees that would cut a unit.

    Errors: UserError naming what would be cut and the degrees that are legal beside the other one.
    """
    own = tuple(dict.fromkeys(splits))
    if tp < 1 or not all(s.allows(tp) for s in own if s.axis is Axis.TP):
        tensor = tuple(s for s in own if s.axis is Axis.TP)
        raise UserError(refusal(Axis.TP, tp, tensor, legal_tp(own, ep) or legal_degrees(own)))
    if fits(own, tp, ep):
        return
    legal = legal_ep(own, tp)
    experts = tuple(s for s in own if s.axis is Axis.EP)
    if not experts and ep > 1:
        raise UserError(f"ep {ep} cannot be used: the model has no experts; legal: 1")
    if tp % ep:
        raise UserError(f"ep {ep} cannot be used: it does not divide tp {tp}; legal: {_listed(legal)}")
    if not all(s.allows(ep) for s in experts):
        raise UserError(refusal(Axis.EP, ep, experts, legal))
    slices = tp // ep
    cut = _cut(tuple(s for s in own if s.axis is Axis.ETP), slices)
    if ep == 1:
        could = f"with ep {_listed(legal)} it could, but with ep 1 " if legal else ""
        raise UserError(f"tp {tp} cannot be used: {could}it does not divide {cut}; legal: {_listed(legal_tp(own))}")
    raise UserError(
        f"ep {ep} cannot be used with tp {tp}: it makes {slices} ranks share an expert, and {slices} does not divide"
        f" {cut}; legal: {_listed(legal)}"
    )


def refusal(axis: Axis, degree: int, splits: tuple[Split, ...], legal: tuple[int, ...] | None = None) -> str:
    """Say in one sentence why `degree` is illegal and which degrees are legal."""
    found = legal_degrees(splits, axis) if legal is None else legal
    return f"{axis} {degree} cannot be used: it does not divide {_cut(splits, degree)}; legal: {_listed(found)}"


def _cut(splits: tuple[Split, ...], degree: int) -> str:
    return " or ".join(sorted({f"{s.units} {s.what}" for s in splits if degree < 1 or not s.allows(degree)}))


def _listed(degrees: tuple[int, ...]) -> str:
    return ", ".join(map(str, degrees)) or "none"
