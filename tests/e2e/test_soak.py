"""Thousands of requests with random ends leave nothing behind: no page, slot, task or descriptor, and no memory.

`python -m tests.e2e.soak` runs the same for longer.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.harness import Server
from tests.e2e.soak import FLAGS, NULL, NULL_PROGRAM, REAL, Outcome, report, soak

pytestmark = pytest.mark.multirank

# MiB of any process since the first quarter. Without a model 8 were seen in 1500 requests, in the server, on a machine
# with five times more to do than it has cores: a heap grows with the largest crowd, and 24 are 16 kB a request. The
# heaps of real workers grow with the largest batch: 14 MiB were seen in 225 requests.
GROWTH_MIB = {"null": 24, "real": 32}


def judge(outcome: Outcome, count: int, growth_mib: int) -> None:
    """`soak` has waited for pages, slots, tasks and descriptors to come back; the rest is here."""
    report(outcome, print)
    seen = outcome.seen
    assert not seen.faults, "\n".join(seen.faults[:10])
    assert seen.given_up >= count / 4
    answered = sum(number for kind, number in seen.statuses.items() if kind.endswith(" 200"))
    assert answered >= count / 5, seen.statuses
    assert max(outcome.growth) < growth_mib, outcome.growth


@pytest.mark.timeout(600)
def test_2000_requests_through_server_core_and_workers_leave_nothing(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """The model does nothing, so that the steps are fast; all else is the product's."""
    with Server(checkpoints["text-fp8"], tmp_path, FLAGS, program=NULL_PROGRAM) as server:
        outcome = soak(server, 2000, 5, *NULL)
    judge(outcome, 2000, GROWTH_MIB["null"])
    assert outcome.preemptions >= 1


@pytest.mark.timeout(600)
def test_60_requests_of_a_real_model_leave_nothing(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    with Server(checkpoints["text-fp8"], tmp_path, FLAGS) as server:
        judge(soak(server, 60, 6, *REAL), 60, GROWTH_MIB["real"])
