"""Packing small arrays: fields do not overlap, keep their bits and their alignment, and a CPU copies nothing."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from rocm_serve.executor.upload import Upload, offsets

CPU = torch.device("cpu")


@given(st.lists(st.integers(0, 100), max_size=9))
def test_fields_lie_one_after_the_other_on_whole_vectors(sizes: list[int]) -> None:
    at = offsets(sizes)
    assert at[0] == 0 and all(start % 16 == 0 for start in at)
    for start, end, size in zip(at, at[1:], sizes, strict=False):
        assert size <= end - start < size + 16


@given(st.lists(st.tuples(st.sampled_from(["<i8", "<i4", "<f4"]), st.integers(0, 5), st.integers(1, 3)), max_size=6))
def test_what_is_written_to_a_buffer_is_there_and_nothing_else(shapes: list[tuple[str, int, int]]) -> None:
    rng = np.random.default_rng(len(shapes))
    arrays = [rng.integers(0, 1 << 20, (rows, width)).astype(kind) for kind, rows, width in shapes]
    at = offsets([array.nbytes for array in arrays])
    buffer = torch.full((at[-1] + 32,), 0xA5, dtype=torch.uint8)
    Upload(CPU).into(buffer, arrays)
    for start, array in zip(at, arrays, strict=False):
        assert buffer[start : start + array.nbytes].numpy().tobytes() == array.tobytes()
    assert (buffer[at[-1] :] == 0xA5).all()


def test_an_array_that_is_no_block_of_memory_arrives_in_its_order() -> None:
    table = np.arange(24, dtype=np.int32).reshape(4, 6)[::2, 1:4]
    buffer = torch.zeros(64, dtype=torch.uint8)
    Upload(CPU).into(buffer, [table])
    assert buffer[:24].view(torch.int32).tolist() == [1, 2, 3, 13, 14, 15]


def test_on_a_cpu_arrays_are_where_they_should_be() -> None:
    array = np.arange(5)
    (tensor,) = Upload(CPU)(array)
    array[3] = 99
    assert tensor.tolist() == [0, 1, 2, 99, 4]
