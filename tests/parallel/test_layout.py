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
    bytes_at,
    check_degrees,
    copies,
    legal_degrees,
    legal_ep,
    legal_tp,
    shape_at,
)


def fused_projection() -> Param:
    """q, k, v as three slices of one tensor and z as its own; the k heads may be held twice."""
    heads, few = Split(8, "heads"), Split(2, "KV heads", repeat=True)
    rows = (Band(32, heads), Band(6, few), Band(6, few), Band(16, heads))
    starts = (0, 32, 38)
    qkv = tuple(Part("qkv", (44, 5), (i, 0), (start, 0)) for i, start in enumerate(starts))
    return Param("qkvz", "model", (rows, (Band(5),)), (*qkv, Part("z", (16, 5), (3, 0), (0, 0))))


def experts_box(slots: int) -> tuple[tuple[Band, ...], ...]:
    wide = Band(8, Split(8, "columns", Axis.ETP))
    return (Band(slots, Split(slots, "experts", Axis.EP)),), (wide, wide), (Band(3),)


def stacked_experts(slots: tuple[int, ...] = (0, 1, 2, 3)) -> Param:
    """Gate and up of each expert as tensors of their own; `slots` says whose each slot is."""
    parts = tuple(
        Part(f"{e}.{x}", (8, 3), (0, i, 0), (0, 0), at=p) for p, e in enumerate(slots) for i, x in enumerate(("g", "u"))
    )
    return Param("w13", "fp8", experts_box(len(slots)), parts)


def fused_experts() -> Param:
    parts = tuple(Part("w13", (4, 16, 3), (0, i, 0), (0, 8 * i, 0)) for i in range(2))
    return Param("w13", "model", experts_box(4), parts)


def moved_experts(slots: tuple[int, ...] = (2, 0, 3, 1)) -> Param:
    """As fused_experts, but each slot takes a row of its own choice."""
    parts = tuple(
        Part("w13", (4, 16, 3), (0, i, 0), (e, 8 * i, 0), at=p) for p, e in enumerate(slots) for i in range(2)
    )
    return Param("w13", "model", experts_box(len(slots)), parts)


def columns() -> Param:
    return Param("o", "model", ((Band(7),), (Band(16, Split(8, "heads")),)), (Part("o", (7, 16), (0, 0), (0, 0)),))


PARAMS = (fused_projection(), stacked_experts(), stacked_experts((2, 0, 3, 1)), fused_experts(), columns())


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


@pytest.mark.parametrize("param", PARAMS, ids=["projection", "stacked", "moved", "fused", "columns"])
@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 1), (4, 1), (8, 1), (2, 2), (4, 2), (4, 4), (8, 2), (8, 4)])
def test_every_element_is_loaded_equally_often_and_written_once(param: Param, tp: int, ep: int) -> None:
    check_law(param, [Place(tp, t, ep) for t in range(tp)])


@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (4, 1), (4, 2), (8, 4)])
def test_rows_of_one_tensor_land_in_the_slots_that_the_table_names(tp: int, ep: int) -> None:
    """Filled from numbers, fused and stacked experts come out alike, replicas too."""
    slots = (2, 0, 3, 1, 2, 1, 0, 2)
    whole = np.arange(4 * 16 * 3).reshape(4, 16, 3)
    tensors = {"w13": whole} | {f"{e}.{x}": whole[e, 8 * i : 8 * i + 8] for e in range(4) for i, x in enumerate("gu")}
    expected = whole[list(slots)]
    for place in (Place(tp, rank, ep) for rank in range(tp)):
        found = []
        for param in (moved_experts(slots), stacked_experts(slots)):
            local = np.full(shape_at(param, place), -1)
            for copy in copies(param, place):
                local[copy.dst] = tensors[copy.key][copy.src].reshape(local[copy.dst].shape)
            found.append(local)
        each, width = len(slots) // ep, 8 * ep // tp
        own = expected[place.ep_rank * each :][:each]
        first = place.expert_slice * width
        columns = [*range(first, first + width), *range(8 + first, 8 + first + width)]
        assert np.array_equal(found[0], found[1]) and np.array_equal(found[0], own[:, columns])


def test_neighbours_share_an_expert() -> None:
    ranks = [Place(8, rank, 2) for rank in range(8)]
    assert [place.on(Axis.EP) for place in ranks] == [(2, 0)] * 4 + [(2, 1)] * 4
    assert [place.on(Axis.ETP) for place in ranks] == [(4, 0), (4, 1), (4, 2), (4, 3)] * 2
    assert [place.on(Axis.TP) for place in ranks] == [(8, rank) for rank in range(8)]
    assert Place(8, 5, 8).on(Axis.EP) == (8, 5) and Place(8, 5).on(Axis.ETP) == (8, 5)


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
        check_degrees(param.splits, degree)
        check_law(param, [Place(degree, rank) for rank in range(degree)])
    else:
        with pytest.raises(UserError, match=f"tp {degree} cannot be used"):
            check_degrees(param.splits, degree)
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
        check_degrees(splits, 8)
    with pytest.raises(UserError, match="legal: 1, 2, 4"):
        check_degrees(splits, 0)


EXPERTS = (Split(8, "heads"), Split(12, "experts", Axis.EP), Split(2, "blocks of columns", Axis.ETP))


def test_the_degrees_of_experts_depend_on_each_other() -> None:
    assert legal_tp(EXPERTS) == (1, 2) and legal_tp(EXPERTS, 2) == (2, 4) and legal_tp(EXPERTS, 4) == (4, 8)
    assert [legal_ep(EXPERTS, tp) for tp in (1, 2, 4, 8)] == [(1,), (1, 2), (2, 4), (4,)]
    for tp in (1, 2, 4, 8):
        for ep in range(1, 13):
            if ep in legal_ep(EXPERTS, tp):
                check_degrees(EXPERTS, tp, ep)
            else:
                with pytest.raises(UserError, match="cannot be used"):
                    check_degrees(EXPERTS, tp, ep)


@pytest.mark.parametrize(
    ("tp", "ep", "said"),
    [
        (16, 2, "tp 16 cannot be used: it does not divide 8 heads; legal: 2, 4"),
        (4, 3, "ep 3 cannot be used: it does not divide tp 4; legal: 2, 4"),
        (8, 8, "ep 8 cannot be used: it does not divide 12 experts; legal: 4"),
        (
            4,
            1,
            "tp 4 cannot be used: with ep 2, 4 it could, but with ep 1 it does not divide 2 blocks of columns;"
            " legal: 1, 2",
        ),
        (
            8,
            2,
            "ep 2 cannot be used with tp 8: it makes 4 ranks share an expert, and 4 does not divide"
            " 2 blocks of columns; legal: 4",
        ),
    ],
)
def test_what_would_cut_an_expert_is_refused_with_what_is_legal_beside_it(tp: int, ep: int, said: str) -> None:
    with pytest.raises(UserError) as refused:
        check_degrees(EXPERTS, tp, ep)
    assert str(refused.value) == said


def test_without_experts_there_is_one_expert_rank() -> None:
    check_degrees(EXPERTS[:1], 8)
    with pytest.raises(UserError, match=r"^ep 2 cannot be used: the model has no experts; legal: 1$"):
        check_degrees(EXPERTS[:1], 8, 2)


def test_without_a_split_there_is_nothing_to_refuse() -> None:
    check_degrees((), 3)


def test_shapes_and_bytes_are_those_of_the_copies() -> None:
    param = fused_projection()
    assert param.shape == (60, 5)
    assert shape_at(param, Place(4, 1)) == (8 + 3 + 3 + 4, 5)
    assert bytes_at(param, Place(4, 1), model_itemsize=2) == 18 * 5 * 2
    assert bytes_at(stacked_experts(), Place(2, 1), model_itemsize=4) == 4 * 8 * 3
    assert bytes_at(stacked_experts(), Place(4, 1, 2), model_itemsize=4) == 2 * 8 * 3
