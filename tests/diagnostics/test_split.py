"""Cuts into stages, against trying all of them."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from rocm_serve.diagnostics.split import Pieces


@given(st.lists(st.integers(1, 50), min_size=1, max_size=9), st.integers(0, 80), st.integers(0, 80), st.data())
def test_the_neutral_cut_is_as_light_as_the_lightest_of_all_cuts(
    layers: list[int], first: int, last: int, data: st.DataObject
) -> None:
    pp = data.draw(st.integers(1, len(layers)))
    pieces = Pieces(tuple(layers), first, last)
    every = []
    for ends in combinations(range(1, len(layers)), pp - 1):
        cuts = (0, *ends, len(layers))
        every.append(pieces.cut([b - a for a, b in zip(cuts, cuts[1:], strict=False)]).heaviest)
    neutral = pieces.neutral(pp)
    assert neutral.heaviest == min(every) <= pieces.even(pp).heaviest
    assert sum(neutral.layers) == len(layers) and min(neutral.layers) >= 1
    assert sum(neutral.stage_bytes) == sum(layers) + first + last
