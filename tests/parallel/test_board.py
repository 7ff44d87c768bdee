"""Notes between ranks: each written once, seen by all, over a store and inside one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch.distributed as dist

from rocm_serve.parallel.board import Board, NotesOfOneProcess, StoreBoard, read


def in_one_process(size: int) -> list[Board]:
    notes: dict[str, str] = {}
    return [NotesOfOneProcess(rank, size, notes) for rank in range(size)]


def over_a_store(size: int) -> list[Board]:
    master = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=20))
    others = [dist.TCPStore("127.0.0.1", master.port, None, False, timedelta(seconds=20)) for _ in range(size - 1)]
    return [StoreBoard(store, rank, size) for rank, store in enumerate([master, *others])]


@pytest.mark.parametrize("make", [in_one_process, over_a_store])
def test_a_note_of_one_rank_is_read_by_the_others(make: Callable[[int], list[Board]]) -> None:
    boards = make(3)
    assert [board.look("decision") for board in boards] == [None] * 3
    text = "µ and a long one " * 5000
    boards[0].post("decision", text)
    assert [board.look("decision") for board in boards] == [text] * 3
    assert boards[1].look("other") is None
    assert [(board.rank, board.size) for board in boards] == [(0, 3), (1, 3), (2, 3)]


@pytest.mark.parametrize("make", [in_one_process, over_a_store])
def test_a_reader_waits_and_says_that_it_lives(make: Callable[[int], list[Board]]) -> None:
    first, second = make(2)
    thrice = threading.Semaphore(0)

    def late() -> None:
        assert all(thrice.acquire(timeout=20) for _ in range(3))
        first.post("decision", "now")

    writer = threading.Thread(target=late)
    writer.start()
    assert read(second, "decision", thrice.release, 60) == "now"
    writer.join()


def test_a_note_is_written_once() -> None:
    board = NotesOfOneProcess()
    board.post("decision", "a")
    with pytest.raises(AssertionError, match="decision is written twice"):
        board.post("decision", "b")
