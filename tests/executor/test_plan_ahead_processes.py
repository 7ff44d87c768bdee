"""Two worker processes over gloo with steps planned ahead: the same tokens; a rank dies with two steps under way."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from rocm_serve.executor.api import ExecutorFailed
from rocm_serve.executor.heartbeat import heartbeat_file, read_progress
from rocm_serve.platform.probe import free_port
from tests.executor.generate import Answer, Requests, session
from tests.executor.processes import World, world
from tests.executor.simulated import SimulatedExecutor
from tests.executor.test_plan_ahead import requests
from tests.executor.wishes import resolved

pytestmark = pytest.mark.multirank


@pytest.fixture(scope="module")
def two(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    run_dir = tmp_path_factory.mktemp("w")
    address = f"127.0.0.1:{free_port()}"
    wish = resolved(model=str(checkpoint), tp=2, plan_ahead="on", run_dir=str(run_dir), dist_init_addr=address)
    with world(wish, run_dir) as running:
        yield running


def test_tokens_are_those_of_steps_one_after_the_other(checkpoint: Path, two: World, mixed_requests: Requests) -> None:
    """Some of which need the host, so that ordinary steps follow on those planned ahead."""
    assert two.session.limits.plan_ahead and two.session.executor.depth == 2
    every = requests({}) | {name: mixed_requests[name] for name in "bdf"}
    with session(SimulatedExecutor(resolved(model=str(checkpoint), tp=2))) as simulated:
        expected = simulated.generate(every)
    assert two.session.generate(requests({})) == {name: expected[name] for name in requests({})}
    assert two.session.deepest == 2
    assert two.session.generate(every) == expected


def test_a_rank_killed_with_a_step_planned_behind_its_own_is_named_with_the_oldest(two: World) -> None:
    """The last test of this world. The rank stands still, so that both steps are under way when it dies."""
    answers = {name: Answer() for name in ("r7", "r8")}
    two.session.add({name: requests({})[name] for name in answers})
    for _ in range(3):
        two.session.step(answers)
    two.workers[1].send_signal(signal.SIGSTOP)
    while (plan := two.session.scheduler.schedule()) is not None:
        two.session.executor.submit(plan)
    assert len(two.session.scheduler.in_flight) == 2
    oldest = two.session.scheduler.in_flight[0].plan.seq
    two.workers[1].send_signal(signal.SIGKILL)
    with pytest.raises(ExecutorFailed, match=rf"rank 1 died without a word during step ({oldest}|{oldest + 1})"):
        while True:
            two.session.executor.poll(1.0)
    assert read_progress(heartbeat_file(str(two.run_dir), "rank-0")).step >= oldest - 1
