"""Two by two worker processes over gloo: the bits of simulated ranks, two plans in flight, a death that is named."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from rocm_serve.executor.api import ExecutorFailed
from rocm_serve.platform.probe import free_port
from tests.executor.generate import Requests, session
from tests.executor.processes import World, world
from tests.executor.simulated import SimulatedExecutor
from tests.executor.wishes import resolved

pytestmark = pytest.mark.multirank


@pytest.fixture(scope="module")
def two_by_two(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    run_dir = tmp_path_factory.mktemp("w")
    address = f"127.0.0.1:{free_port()}"
    wish = resolved(
        model=str(checkpoint),
        tp=2,
        pp=2,
        op={"layers.3.rms_norm": "reference", "rms_norm": "reference"},
        run_dir=str(run_dir),
        dist_init_addr=address,
    )
    variables = {"XDG_CACHE_HOME": str(run_dir / "cache")}
    with world(wish, run_dir, worker="tests.executor.probed_worker", variables=variables) as running:
        yield running


def test_processes_give_the_bits_of_simulated_ranks_in_one_stage(
    checkpoint: Path, two_by_two: World, mixed_requests: Requests
) -> None:
    requests = {name: mixed_requests[name] for name in "abdfgh"}
    answers = two_by_two.session.generate(requests)
    with session(SimulatedExecutor(resolved(model=str(checkpoint), tp=2, pp=1))) as simulated:
        assert simulated.generate(requests) == answers
    assert two_by_two.session.deepest == 2


def test_the_log_of_each_rank_says_what_it_did(two_by_two: World) -> None:
    for rank in range(4):
        log = two_by_two.log(rank)
        for words in ("joining the other ranks", "loading", "GB/s", "left for caches", "warming up", "serving"):
            assert words in log, f"rank {rank} does not say {words!r}"


def test_ranks_bound_to_the_reference_probe_nothing(two_by_two: World) -> None:
    """Though their table has others: those of test_probed_processes.py, which one rank probes for all."""
    for rank in range(4):
        log = two_by_two.log(rank)
        assert "probe of" not in log and "op rms_norm: good" not in log, f"rank {rank}"
    assert " by reference" in two_by_two.log(0)
    assert not (two_by_two.run_dir / "cache").exists(), "no verdict is kept"


def test_a_killed_worker_is_named_and_the_others_leave(two_by_two: World, mixed_requests: Requests) -> None:
    """The last test of this world."""
    two_by_two.workers[3].send_signal(signal.SIGKILL)
    with pytest.raises(ExecutorFailed, match="rank 3 died without a word during (step|serving)"):
        while True:
            two_by_two.session.generate({"b": mixed_requests["b"]})
    two_by_two.session.executor.shutdown()
    for rank, process in enumerate(two_by_two.workers):
        code = process.wait(timeout=20)
        assert code == (-signal.SIGKILL if rank == 3 else code)
    assert not list(two_by_two.run_dir.glob("*.sock"))
