"""The sharding table: over all ranks every checkpoint element is loaded equally often, every local one written once."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocm_serve.errors import UserError
from rocm_serve.parallel.layout import (
    Axis,
    Band,
    Param,
    Part,
    Place,
    Split,
    check_degree,
    copies,
    legal_degrees,
    local_bytes,
    local_shape,
    shape_at,
)


def fused_projection() -> Param:
    """q, k, v as three slices of one tensor and z as its own; the k heads may be held twice."""
    heads, few = Split(8, "heads"), Split(2, "KV heads", repeat=True)
    rows = (Band(32, heads), Band(6, few), Band(6, few), Band(16, heads))
    starts = (0, 32, 38)
    qkv = tuple(Part("qkv", (44, 5), (i, 0), (start, 0)) for i, start in enumerate(starts))
    return Param("qkvz", "model", (rows, (Band(5),)), (*qkv, Part("z", (16, 5), (3, 0), (0, 0))))


def stacked_experts() -> Param:
    """Gate and up of each expert as tensors of their own."""
    wide = Band(8, Split(8, "columns"))
    parts = tuple(Part(f"{e}.{x}", (8, 3), (0, i, 0), (0, 0), at=e) for e in range(4) for i, x in enumerate(("g", "u")))
    return Param("w13", "fp8", ((Band(4, Split(4, "experts", Axis.EP)),), (wide, wide), (Band(3),)), parts)


def fused_experts() -> Param:
    wide = Band(8, Split(8, "columns"))
    parts = tuple(Part("w13", (4, 16, 3), (0, i, 0), (0, 8 * i, 0)) for i in range(2))
    return Param("w13", "model", ((Band(4, Split(4, "experts", Axis.EP)),), (wide, wide), (Band(3),)), parts)


def columns() -> Param:
    return Param("o", "model", ((Band(7),), (Band(16, Split(8, "heads")),)), (Part("o", (7, 16), (0, 0), (0, 0)),))


PARAMS = (fused_projection(), stacked_experts(), fused_experts(), columns())


def check_law(param: Param, places: list[Place]) -> None:
    hits: dict[str, np.ndarray] = {}
    for place in places:
        local = np.zeros(shape_at(param, place), np.int64)
        for copy in copies(param, place):
            source = next(part.source for part in param.parts if part.key == copy.key)
            hits.setdefault(copy.key, np.zeros(source, np.int64))[copy.src] += 1
            local[copy.dst] += 1
            assert copy.elements == local[copy.dst].size
        assert (local == 1).all(), f"{param.name}: a hole or an overlap"
    assert hits.keys() == {part.key for part in param.parts}
    for key, count in hits.items():
        levels = {int(count[region].min()) for region in regions(param, key)}
        assert min(levels) >= 1
        for region in regions(param, key):
            assert count[region].min() == count[region].max(), f"{key}: loaded unevenly"


def regions(param: Param, key: str) -> list[tuple[slice, ...]]:
    """The slabs of a checkpoint tensor that one band each covers; together they must be the whole tensor."""
    found = []
    for part in param.parts:
        if part.key == key:
            lead = 0 if part.at is None else 1
            sizes = [param.dims[d][part.bands[d]].size for d in range(lead, len(param.dims))]
            found.append(tuple(slice(s, s + n) for s, n in zip(part.start, sizes, strict=True)))
    source = next(part.source for part in param.parts if part.key == key)
    assert sum(prod(s.stop - s.start for s in region) for region in found) == prod(source)
    return found


@pytest.mark.parametrize("param", PARAMS, ids=["projection", "stacked", "fused", "columns"])
@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (2, 2), (4, 4)])
def test_every_element_is_loaded_equally_often_and_written_once(param: Param, tp: int, ep: int) -> None:
    check_law(param, [Place(tp, t, ep, e) for t in range(tp) for e in range(ep)])


@given(
    heads=st.integers(1, 6),
    few=st.integers(1, 4),
    width=st.integers(1, 3),
    inner=st.integers(1, 3),
    degree=st.integers(1, 12),
)
def test_a_degree_is_legal_exactly_when_it_can_be_laid_out(
    heads: int, few: int, width: int, inner: int, degree: int
) -> None:
    many, kv = Split(heads * few, "heads"), Split(few, "KV heads", repeat=True)
    rows = (Band(heads * few * width, many), Band(few * width, kv))
    parts = (
        Part("q", (rows[0].size, inner), (0, 0), (0, 0)),
        Part("k", (rows[1].size, inner), (1, 0), (0, 0)),
    )
    param = Param("qk", "model", (rows, (Band(inner),)), parts)
    if degree in legal_degrees(param.splits):
        check_degree(param.splits, degree)
        check_law(param, [Place(degree, rank) for rank in range(degree)])
    else:
        with pytest.raises(UserError, match=f"tp {degree} cannot be used"):
            check_degree(param.splits, degree)
        with pytest.raises(UserError, match=f"tp {degree} cannot be used"):
            list(copies(param, Place(degree, 0)))


def test_neighbours_hold_the_same_repeated_unit() -> None:
    def second_slab(rank: int) -> tuple[slice, ...]:
        return list(copies(fused_projection(), Place(8, rank)))[1].src

    assert second_slab(0) == second_slab(3) == (slice(32, 35), slice(0, 5))
    assert second_slab(4) == second_slab(7) == (slice(35, 38), slice(0, 5))


def test_a_refusal_names_what_would_be_cut_and_the_legal_degrees() -> None:
    splits = (Split(12, "heads"), Split(8, "blocks"), Split(2, "KV heads", repeat=True))
    assert legal_degrees(splits) == (1, 2, 4)
    with pytest.raises(UserError, match=r"^tp 8 cannot be used: it does not divide 12 heads; legal: 1, 2, 4$"):
        check_degree(splits, 8)
    with pytest.raises(UserError, match="legal: 1, 2, 4"):
        check_degree(splits, 0)


def test_without_a_split_there_is_nothing_to_refuse() -> None:
    check_degree((), 3)


def test_shapes_and_bytes_are_those_of_the_copies() -> None:
    param = fused_projection()
    assert param.shape == (60, 5)
    assert local_shape(param, 4, 1) == (8 + 3 + 3 + 4, 5)
    assert local_bytes(param, 4, 1, model_itemsize=2) == 18 * 5 * 2
    assert local_bytes(stacked_experts(), 2, 1, model_itemsize=4) == 4 * 8 * 3
