"""The core's side of the worker channel, with scripted workers at the other end (threads that speak the protocol)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from rocm_serve.executor.api import ExecutorFailed
from rocm_serve.executor.link import WorkerLink, channels
from rocm_serve.executor.multiproc import MultiprocExecutor
from rocm_serve.messages import (
    WIRE_VERSION,
    AllocateCache,
    NewRequest,
    Plan,
    Shutdown,
    StepResult,
    ToWorker,
    Work,
    WorkerFailed,
    WorkerLoaded,
    WorkerReady,
)
from rocm_serve.types import SamplingParams
from tests.executor.wishes import resolved

Script = Callable[[WorkerLink, int], None]


def loaded(rank: int, version: int = WIRE_VERSION) -> WorkerLoaded:
    return WorkerLoaded(rank, version, 10**9, 1000 + rank, 1000)


def next_message(link: WorkerLink) -> ToWorker:
    message = link.receive(wait=True)
    assert message is not None
    return message


def start_up(link: WorkerLink, rank: int) -> None:
    link.send(loaded(rank))
    assert isinstance(next_message(link), AllocateCache)
    link.send(WorkerReady(rank))


def obedient(link: WorkerLink, rank: int) -> None:
    start_up(link, rank)
    while isinstance(message := next_message(link), Plan):
        if rank == 2:
            link.send(StepResult(message.seq, ()))
    assert isinstance(message, Shutdown)


@contextmanager
def world(tmp_path: Path, *scripts: Script, pp: int = 2, dist_timeout: int = 20) -> Iterator[MultiprocExecutor]:
    """Four ranks; the last script given serves all remaining ranks."""
    wish = resolved(tp=2, pp=pp, run_dir=str(tmp_path), dist_timeout=dist_timeout)

    def work(rank: int) -> None:
        link = WorkerLink(channels(wish), rank)
        try:
            scripts[min(rank, len(scripts) - 1)](link, rank)
        finally:
            link.close()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2 * pp)]
    for thread in threads:
        thread.start()
    executor = MultiprocExecutor(wish)
    try:
        yield executor
    finally:
        executor.shutdown()
        for thread in threads:
            thread.join(timeout=30)
            assert not thread.is_alive()


def plan(seq: int) -> Plan:
    new = NewRequest(seq, (1, 2, 3), SamplingParams(max_tokens=3, logit_bias={5: 1.5}, stop_token_ids=(7,)))
    return Plan(seq, (Work(seq, 0, 3, False, True, 1, (0,)),), (new,))


def test_results_come_back_in_order_with_as_many_plans_in_flight_as_stages(tmp_path: Path) -> None:
    with world(tmp_path, obedient) as executor:
        limits = executor.start()
        assert executor.depth == 2 and limits.num_slots == 8
        for seq in range(0, 40, 2):
            executor.submit(plan(seq))
            executor.submit(plan(seq + 1))
            for expected in (seq, seq + 1):
                result = executor.poll(20)
                assert result is not None and result.seq == expected
        assert executor.poll(0.01) is None


def test_a_message_for_the_core_ends_its_wait_for_a_result(tmp_path: Path) -> None:
    def slow(link: WorkerLink, rank: int) -> None:
        start_up(link, rank)
        assert isinstance(next_message(link), Plan)
        go.wait(20)
        if rank == 2:
            link.send(StepResult(0, ()))
        assert isinstance(next_message(link), Shutdown)

    go = threading.Event()
    context = zmq.Context()
    inbox, server = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    inbox.bind("inproc://inbox")
    server.connect("inproc://inbox")
    try:
        with world(tmp_path, slow) as executor:
            executor.start()
            executor.submit(plan(0))
            assert executor.poll(0.01, inbox) is None
            server.send(b"a new request")
            began = time.monotonic()
            assert executor.poll(60, inbox) is None
            assert time.monotonic() - began < 30, "it slept through the message"
            go.set()
            inbox.recv()
            result = executor.poll(60, inbox)
            assert result is not None and result.seq == 0
    finally:
        context.destroy(linger=0)


def test_plans_arrive_whole_at_every_worker(tmp_path: Path) -> None:
    got: dict[int, list[Plan]] = {}

    def recording(link: WorkerLink, rank: int) -> None:
        start_up(link, rank)
        got[rank] = []
        while isinstance(message := next_message(link), Plan):
            got[rank].append(message)
            if rank == 2:
                link.send(StepResult(message.seq, ()))

    sent = [plan(seq) for seq in range(5)]
    with world(tmp_path, recording) as executor:
        executor.start()
        for one in sent:
            executor.submit(one)
            assert executor.poll(20) is not None
    assert got == dict.fromkeys(range(4), sent)


def test_a_worker_of_another_version_is_refused(tmp_path: Path) -> None:
    def old(link: WorkerLink, rank: int) -> None:
        link.send(loaded(rank, version=WIRE_VERSION + (rank == 3)))
        assert isinstance(next_message(link), Shutdown)

    with world(tmp_path, old) as executor, pytest.raises(ExecutorFailed, match="rank 3 speaks wire version"):
        executor.start()


def test_a_worker_that_complains_is_named_with_its_phase(tmp_path: Path) -> None:
    def refuses(link: WorkerLink, rank: int) -> None:
        if rank == 1:
            link.send(WorkerFailed(1, "loading", "tensor x is missing"))
        else:
            assert isinstance(next_message(link), Shutdown)

    with (
        world(tmp_path, refuses) as executor,
        pytest.raises(ExecutorFailed, match="rank 1 failed during loading: tensor x is missing"),
    ):
        executor.start()


def test_a_worker_that_dies_without_a_word_is_named_before_those_that_fail_with_it(tmp_path: Path) -> None:
    def fragile(link: WorkerLink, rank: int) -> None:
        start_up(link, rank)
        assert isinstance(next_message(link), Plan)
        if rank == 2:
            link.send(WorkerFailed(2, "step 0", "Connection closed by peer"))
        elif rank != 3:
            assert isinstance(next_message(link), Shutdown)

    with world(tmp_path, fragile) as executor:
        executor.start()
        executor.submit(plan(0))
        with pytest.raises(ExecutorFailed, match="rank 3 died without a word during step 0"):
            while True:
                executor.poll(1)


def test_a_worker_that_never_joins_is_named(tmp_path: Path) -> None:
    wish = resolved(tp=1, pp=2, run_dir=str(tmp_path), dist_timeout=1)
    executor = MultiprocExecutor(wish)
    with pytest.raises(ExecutorFailed, match=r"ranks \[0, 1\] did not join within 1 s"):
        executor.start()
    executor.shutdown()


def test_a_step_without_a_result_fails_after_the_timeout(tmp_path: Path) -> None:
    def deaf(link: WorkerLink, rank: int) -> None:
        start_up(link, rank)
        while isinstance(next_message(link), Plan):
            pass

    with world(tmp_path, deaf, dist_timeout=1) as executor:
        executor.start()
        executor.submit(plan(0))
        with pytest.raises(ExecutorFailed, match="step 0 has no result after --dist-timeout 1 s"):
            for _ in range(100):
                executor.poll(0.1)


def test_an_idle_executor_notices_a_dead_worker(tmp_path: Path) -> None:
    def leaves(link: WorkerLink, rank: int) -> None:
        start_up(link, rank)
        if rank != 1:
            assert isinstance(next_message(link), Shutdown)

    with world(tmp_path, leaves) as executor, pytest.raises(ExecutorFailed, match="rank 1 died without a word"):
        executor.start()
        for _ in range(100):
            executor.poll(0.1)


def test_shutdown_twice_and_before_the_start_is_fine(tmp_path: Path) -> None:
    MultiprocExecutor(resolved(run_dir=str(tmp_path))).shutdown()
    with world(tmp_path, obedient) as executor:
        executor.start()
        executor.shutdown()
        executor.shutdown()
    assert not list(tmp_path.glob("*.sock"))
