"""What collectives promise, on simulated ranks: exact sums in rank order, rows that do not see each other."""

from __future__ import annotations

import pytest
import torch

from rocm_serve.parallel.comm import Comm, CountingComm, SoloComm, ThreadComm, as_bytes, run_ranks


def inputs(seed: int, ranks: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(ranks, *shape, generator=generator) * 100).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_all_reduce_is_the_sum_in_rank_order_rounded_once(ranks: int, dtype: torch.dtype) -> None:
    parts = inputs(ranks, ranks, 5, 7, dtype=dtype)
    results = run_ranks(ranks, lambda comm: comm.all_reduce(parts[comm.rank]))
    expected = torch.zeros(5, 7)
    for part in parts:
        expected = expected + part.float()
    for result in results:
        assert result.dtype == dtype
        assert torch.equal(result, expected.to(dtype))


def test_a_row_of_all_reduce_does_not_depend_on_its_place() -> None:
    parts = inputs(0, 4, 64, 33)
    whole = run_ranks(4, lambda comm: comm.all_reduce(parts[comm.rank]))[0]
    for rows in (slice(0, 1), slice(17, 18), slice(30, 63)):
        alone = run_ranks(4, lambda comm, rows=rows: comm.all_reduce(parts[comm.rank, rows]))[0]
        assert torch.equal(alone, whole[rows])


def test_all_reduce_leaves_the_input_of_every_rank_alone() -> None:
    parts = inputs(1, 2, 4)
    before = parts.clone()
    run_ranks(2, lambda comm: comm.all_reduce(parts[comm.rank]))
    assert torch.equal(parts, before)


@pytest.mark.parametrize("shape", [(3,), (2, 5), (0, 4), ()])
def test_all_gather_stacks_in_rank_order(shape: tuple[int, ...]) -> None:
    parts = inputs(2, 3, *shape)
    for result in run_ranks(3, lambda comm: comm.all_gather(parts[comm.rank])):
        assert torch.equal(result, parts)
    solo = SoloComm().all_gather(parts[0])
    assert solo.shape == (1, *shape) and torch.equal(solo[0], parts[0])


def test_an_error_of_one_rank_is_raised_and_frees_the_others() -> None:
    def body(comm: ThreadComm) -> None:
        if comm.rank == 1:
            raise ValueError("rank 1 is broken")
        comm.all_reduce(torch.ones(1))

    with pytest.raises(ValueError, match="rank 1 is broken"):
        run_ranks(3, body)


def test_ranks_that_make_different_numbers_of_calls_are_told_so() -> None:
    def body(comm: ThreadComm) -> None:
        for _ in range(2 + (comm.rank == 0)):
            comm.all_reduce(torch.ones(1))

    with pytest.raises(AssertionError, match="same number of collective calls"):
        run_ranks(2, body)


def test_ranks_that_bring_different_shapes_are_told_so() -> None:
    with pytest.raises(AssertionError, match="different tensors"):
        run_ranks(2, lambda comm: comm.all_gather(torch.ones(1 + comm.rank)))


DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool]
SENT = [[2, 0, 1], [0, 0, 0], [3, 5, 0]]  # rows from each rank to each


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_to_all_brings_rows_in_rank_order(dtype: torch.dtype) -> None:
    """Uneven numbers, a rank that sends nothing and one that is sent little."""
    parts = [inputs(rank, 1, sum(SENT[rank]), 2, 3)[0].to(dtype) for rank in range(3)]

    def body(comm: ThreadComm) -> torch.Tensor:
        return comm.all_to_all(parts[comm.rank], SENT[comm.rank], [row[comm.rank] for row in SENT])

    for rank, result in enumerate(run_ranks(3, body)):
        expected = torch.cat([parts[source].split(SENT[source])[rank] for source in range(3)])
        assert result.dtype == dtype and torch.equal(result.view(torch.uint8), expected.view(torch.uint8))


def test_nobody_has_a_row_for_all_to_all() -> None:
    for result in run_ranks(3, lambda comm: comm.all_to_all(torch.ones(0, 4), [0] * 3, [0] * 3)):
        assert result.shape == (0, 4)
    assert torch.equal(SoloComm().all_to_all(torch.ones(3, 2), [3], [3]), torch.ones(3, 2))


def test_rows_that_are_not_those_expected_are_told() -> None:
    with pytest.raises(AssertionError, match=r"expects \[1, 2\] rows and is sent \[1, 1\]"):
        run_ranks(2, lambda comm: comm.all_to_all(torch.ones(2, 1), [1, 1], [1, 2]))
    with pytest.raises(AssertionError, match=r"2 rows, but \[1, 2\] are to be sent"):
        run_ranks(2, lambda comm: comm.all_to_all(torch.ones(2, 1), [1, 2], [1, 1]))


def test_ranks_in_different_collectives_are_told_so() -> None:
    def body(comm: ThreadComm) -> None:
        comm.all_gather(torch.ones(2)) if comm.rank else comm.all_to_all(torch.ones(2), [1, 1], [1, 1])

    with pytest.raises(AssertionError, match="same number of collective calls"):
        run_ranks(2, body)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_no_library_carries_goes_as_bytes(dtype: torch.dtype) -> None:
    x = torch.ones(2, 3).to(dtype)
    carried = as_bytes(x)
    assert carried.data_ptr() == x.data_ptr() and carried.shape == x.shape
    assert (carried.dtype == torch.uint8) == (dtype in (torch.float8_e4m3fn, torch.bool))


def test_counting_counts_only_what_leaves_the_rank() -> None:
    def body(comm: Comm) -> CountingComm:
        counting = CountingComm(comm)
        counting.all_to_all(torch.ones(6, 4, dtype=torch.bfloat16), [1, 2, 3], [comm.rank + 1] * 3)
        return counting

    for rank, counting in enumerate(run_ranks(3, body)):
        assert counting.calls == {"all_to_all": 1}
        assert counting.bytes == {"all_to_all": (6 - (rank + 1)) * 8}


def test_counting_sees_calls_and_bytes_and_changes_nothing() -> None:
    def body(comm: Comm) -> tuple[CountingComm, torch.Tensor]:
        counting = CountingComm(comm)
        counting.all_reduce(torch.ones(3, 4))
        counting.all_gather(torch.ones(5, dtype=torch.bfloat16))
        return counting, counting.all_reduce(torch.full((2,), float(comm.rank)))

    for counting, summed in run_ranks(2, body):
        assert counting.calls == {"all_reduce": 2, "all_gather": 1}
        assert counting.bytes == {"all_reduce": 3 * 4 * 4 + 2 * 4, "all_gather": 10}
        assert summed.tolist() == [1.0, 1.0]
