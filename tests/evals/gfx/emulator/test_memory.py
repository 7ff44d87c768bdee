"""Memory outside the buffers of a launch does not exist."""

from __future__ import annotations

import numpy as np
import pytest

from evals.gfx.emulator.memory import EmulatorError, Memory


def made(*arrays: np.ndarray) -> Memory:
    memory = Memory()
    for k, array in enumerate(arrays):
        memory.add(array.ctypes.data, array.nbytes, f"array {k}", read_only=k == 1)
    return memory


def addresses(array: np.ndarray, *offsets: int) -> np.ndarray:
    return np.array([array.ctypes.data + offset for offset in offsets], np.uint64)


def test_what_is_stored_is_loaded_again() -> None:
    held, other = np.zeros(64, np.uint8), np.zeros(64, np.uint8)
    memory = made(held, other)
    memory.scatter(addresses(held, 8, 0), np.array([[1, 2], [3, 4]], np.uint8))
    assert held[:10].tolist() == [3, 4, 0, 0, 0, 0, 0, 0, 1, 2]
    assert memory.gather(addresses(held, 8, 0), 2).tolist() == [[1, 2], [3, 4]]
    both = np.concatenate([addresses(held, 8), addresses(other, 62)])
    assert memory.gather(both, 2).tolist() == [[1, 2], [0, 0]]


def test_lanes_of_two_buffers_store_each_to_its_own() -> None:
    first, last = np.zeros(8, np.uint8), np.zeros(8, np.uint8)
    memory = Memory()
    for array in (first, last):
        memory.add(array.ctypes.data, array.nbytes, "array")
    both = np.concatenate([addresses(first, 1), addresses(last, 7)])
    memory.scatter(both, np.array([[5], [6]], np.uint8))
    assert first[1] == 5 and last[7] == 6


@pytest.mark.parametrize(("offset", "size"), [(-1, 1), (63, 2), (64, 1), (10**9, 4)])
def test_an_access_past_an_end_is_refused_naming_the_nearest_buffer(offset: int, size: int) -> None:
    held = np.zeros(64, np.uint8)
    memory = made(held)
    with pytest.raises(EmulatorError, match="load outside every buffer.*array 0 of 64 bytes"):
        memory.gather(addresses(held, 0, offset), size)
    with pytest.raises(EmulatorError, match="store outside every buffer"):
        memory.scatter(addresses(held, offset), np.zeros((1, size), np.uint8))


def test_a_buffer_to_read_from_is_not_written() -> None:
    first, constant = np.zeros(8, np.uint8), np.zeros(8, np.uint8)
    with pytest.raises(EmulatorError, match="store to array 1, which is read-only"):
        made(first, constant).scatter(addresses(constant, 0), np.ones((1, 1), np.uint8))


def test_no_lanes_touch_nothing() -> None:
    memory, none = Memory(), np.zeros(0, np.uint64)
    assert memory.gather(none, 4).shape == (0, 4)
    memory.scatter(none, np.zeros((0, 4), np.uint8))
