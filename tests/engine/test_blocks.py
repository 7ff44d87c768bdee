from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocm_serve.engine.blocks import Pool, pages_for


@given(st.integers(0, 3), st.integers(0, 20), st.lists(st.integers(0, 6), max_size=30))
def test_every_id_is_out_or_free_and_never_both(first: int, count: int, sizes: list[int]) -> None:
    pool = Pool(first, count)
    held: list[list[int]] = []
    for size in sizes:
        if size <= pool.num_free:
            held.append(pool.take(size))
        elif held:
            pool.give_back(held.pop(0))
        pool.check(page for pages in held for page in pages)
        assert pool.num_used == sum(map(len, held)) == count - pool.num_free


def test_the_first_ids_go_first_and_what_comes_back_last_goes_next() -> None:
    pool = Pool(1, 4)
    assert pool.take(3) == [1, 2, 3]
    pool.give_back([2])
    assert pool.take(2) == [2, 4]


def test_taking_more_than_is_free_is_our_mistake() -> None:
    pool = Pool(0, 2)
    with pytest.raises(AssertionError, match="3 asked, 2 free"):
        pool.take(3)


@pytest.mark.parametrize("held", [[0, 0], [0], [0, 1, 2]], ids=["shared", "lost", "foreign"])
def test_check_sees_an_id_that_is_shared_lost_or_foreign(held: list[int]) -> None:
    pool = Pool(0, 2)
    pool.take(2)
    with pytest.raises(AssertionError):
        pool.check(held)


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (4, 1), (5, 2)])
def test_pages_for_rounds_up(tokens: int, pages: int) -> None:
    assert pages_for(tokens, 4) == pages
