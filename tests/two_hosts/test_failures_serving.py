"""Whoever dies, stops or is cut off while requests are open: 503, error objects, and the end of all, on both hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.two_hosts.failures import DEADLINE_S, NO_PREFLIGHT, Failure, OpenRequests, check_death
from tests.two_hosts.namespaces import TwoHosts
from tests.two_hosts.nodes import PP2, TP2_PP2, serving

pytestmark = [pytest.mark.multirank, pytest.mark.slow]

# Every kind of failure in prefill and in decode, on either host, in stages of one rank and of two.
SCENES = [
    (Failure("kill", "rank-3", "decode"), TP2_PP2),
    (Failure("kill", "rank-0", "prefill"), PP2),
    (Failure("stop", "rank-1", "decode"), PP2),
    (Failure("stop", "rank-1", "prefill"), TP2_PP2),
    (Failure("cut", "node-1", "decode", at="rank-0"), PP2),
    (Failure("silence", "node-1", "prefill", at="rank-1"), PP2),
    (Failure("kill", "node-1", "decode", at="rank-1"), PP2),
    (Failure("kill", "node-0", "prefill", at="rank-0"), PP2),
]
PROMPT = {"prefill": [5] * 1800, "decode": [5, 6, 7]}
SAID = {
    "kill rank": "{name} ended with signal SIGKILL in step ",
    "stop rank": "rank {number} has made no progress for 4 s: step ",
    "cut node": "node 1 at 10.77.0.2:",
    "silence node": "node 1 at 10.77.0.2:",
    "kill node": "node 1 at 10.77.0.2:",
}


@pytest.mark.parametrize(("failure", "topology"), SCENES, ids=[str(failure) for failure, _ in SCENES])
def test_a_failure_with_open_requests(
    failure: Failure, topology: list[str], four_layers: Path, tmp_path: Path, hosts: TwoHosts
) -> None:
    flags = [*topology, "--watchdog-timeout", str(DEADLINE_S)]
    body = {"model": "tiny", "prompt": PROMPT[failure.moment], "max_tokens": 2000, "temperature": 0, "ignore_eos": True}
    with serving(four_layers, tmp_path, flags, hosts, NO_PREFLIGHT) as nodes:
        with OpenRequests(nodes, body) as asked:
            failure.happen(nodes)
            check_death(nodes, failure)
        if failure.how == "kill" and failure.who == "node-0":
            asked.check_broken()
        else:
            kind, _, number = failure.who.partition("-")
            asked.check_errors(SAID[f"{failure.how} {kind}"].format(name=failure.who, number=number))
