"""Whoever dies, stops or is cut off while the server loads or warms up: the end of all, on both hosts, and why."""

from __future__ import annotations

from pathlib import Path

import pytest

from rocm_serve.checkpoint.synthetic import make_checkpoint
from tests.two_hosts.failures import DEADLINE_S, NO_PREFLIGHT, Failure, check_death
from tests.two_hosts.namespaces import TwoHosts
from tests.two_hosts.nodes import PP2, TwoHostNodes

pytestmark = [pytest.mark.multirank, pytest.mark.slow]

SCENES = [
    Failure("kill", "rank-1", "load"),
    Failure("kill", "rank-0", "warm-up"),
    Failure("stop", "rank-0", "load"),
    Failure("stop", "rank-1", "warm-up"),
    Failure("silence", "node-1", "load", at="rank-0"),
    Failure("cut", "node-1", "warm-up", at="rank-0"),
    Failure("kill", "node-0", "load", at="rank-1"),
    Failure("kill", "node-1", "warm-up", at="rank-0"),
]


@pytest.fixture(scope="session")
def many_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Enough layers that loading and warming up can be seen before they are over."""
    return make_checkpoint(tmp_path_factory.mktemp("two-hosts") / "deep", "text-bf16", "none", seed=11, layers=16)


@pytest.mark.parametrize("failure", SCENES, ids=str)
def test_a_failure_before_the_server_is_ready(
    failure: Failure, many_layers: Path, tmp_path: Path, hosts: TwoHosts
) -> None:
    flags = [*PP2, "--watchdog-timeout", str(DEADLINE_S)]
    with TwoHostNodes(many_layers, tmp_path, flags, env=NO_PREFLIGHT, hosts=hosts) as nodes:
        failure.happen(nodes)
        assert nodes.base_url == "", "it was not ready yet"
        check_death(nodes, failure)
