"""Experts over the ranks of two hosts, rows sent by torch: the answers of one rank that holds them all."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.e2e.harness import Server
from tests.two_hosts.namespaces import TwoHosts
from tests.two_hosts.nodes import SMALL, TP2_PP2, serving
from tests.two_hosts.test_two_hosts import answers

CLOSE = 1e-4


@pytest.mark.multirank
@pytest.mark.slow
def test_two_hosts_with_experts_over_ranks_answer_as_one_rank_does(
    four_layers: Path, tmp_path: Path, hosts: TwoHosts
) -> None:
    flags = [*TP2_PP2, "--ep", "2", "--expert-exchange", "torch"]
    with serving(four_layers, tmp_path / "two", flags, hosts) as nodes:
        with nodes.client() as client:
            got = answers(client)
            (card,) = client.get("/v1/models").json()["data"]
        nodes.signal("node-0", signal.SIGTERM)
        assert nodes.end(30) == (0, 0)
        assert all("expert_exchange = torch" in node.log for node in nodes.nodes)
    assert card["parallel"] == {"tp": 2, "pp": 2, "ep": 2, "expert_exchange": "torch"}
    with Server(four_layers, tmp_path / "one", SMALL) as one, one.client() as client:
        want = answers(client)
    for (mine,), (expected,) in zip(got, want, strict=True):
        assert mine["text"] == expected["text"]
        one, other = mine["logprobs"], expected["logprobs"]
        assert one["tokens"] == other["tokens"]
        apart = [abs(a - b) for a, b in zip(one["token_logprobs"], other["token_logprobs"], strict=True)]
        assert max(apart) < CLOSE
