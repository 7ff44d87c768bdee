"""launch/two_node.sh on two hosts: the answers of one, bit for bit; long steps; idle hours; orderly ends."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rocm_serve.trace import StageTrace, read_trace
from tests.e2e.harness import Server
from tests.e2e.two_nodes import completion
from tests.made import small_checkpoint
from tests.two_hosts.failures import NO_PREFLIGHT
from tests.two_hosts.namespaces import TwoHosts
from tests.two_hosts.nodes import PP2, SMALL, TP2_PP2, serving
from tests.two_hosts.slow_worker import LAYER_S, WORKER

pytestmark = pytest.mark.multirank

PROMPTS = [[5, 6, 7], list(range(100, 350)), [9] * 65]
DEADLINE_S = 3


def answers(client: Any) -> list[Any]:
    asked = {"max_tokens": 12, "logprobs": 3, "return_tokens_as_token_ids": True}
    given = [completion(client, prompt, **asked) for prompt in PROMPTS]
    assert all("choices" in answer for answer in given), given
    return [answer["choices"] for answer in given]


def test_two_hosts_give_the_bits_of_one_and_an_idle_server_outlives_its_deadline(
    four_layers: Path, tmp_path: Path, hosts: TwoHosts
) -> None:
    flags = [*TP2_PP2, "--watchdog-timeout", str(DEADLINE_S)]
    with serving(four_layers, tmp_path / "two", flags, hosts) as nodes:
        with nodes.client() as client:
            got = answers(client)
        idle_since = time.monotonic()
        for name, topology in {"tp2-pp2": TP2_PP2, "tp2": ["--tp", "2", *SMALL]}.items():
            with Server(four_layers, tmp_path / name, topology) as one, one.client() as client:
                assert got == answers(client), f"{name} on one host answers otherwise"
        time.sleep(max(0.0, idle_since + 3 * DEADLINE_S - time.monotonic()))
        assert nodes.health() == 200, "an idle server is a healthy one"
        with nodes.client() as client:
            assert got == answers(client), "also after it was idle"
        nodes.signal("node-1", signal.SIGTERM)
        assert nodes.end(30) == (0, 0)
        assert "another node was told to stop" in nodes.nodes[0].log
        assert "node 0 stops" in nodes.nodes[1].log
        assert not any(map(hosts.pids, (0, 1)))


@pytest.mark.slow
def test_a_step_longer_than_the_deadline_is_no_death_as_long_as_its_layers_move(
    tmp_path: Path, hosts: TwoHosts
) -> None:
    """Every layer of a prompt takes a second, on any machine: see slow_worker.py. Each of two stages has four."""
    model = small_checkpoint(tmp_path / "deep", "text-bf16", "bf16", seed=11, layers=8)
    slow = tmp_path / "bin" / "rocm-serve"
    slow.parent.mkdir()
    slow.write_text(f'#!/bin/sh\nexec {sys.executable} -m {WORKER} "$@"\n')
    slow.chmod(0o755)
    path = os.pathsep.join([str(slow.parent), str(Path(sys.executable).parent), os.environ["PATH"]])
    env = dict.fromkeys((0, 1), {"PATH": path, **NO_PREFLIGHT[0]})
    flags = [*PP2, "--watchdog-timeout", str(DEADLINE_S), "--trace", str(tmp_path / "trace")]
    with serving(model, tmp_path / "two", flags, hosts, env) as nodes:
        with nodes.client() as client:
            answer = completion(client, [5, 6, 7], max_tokens=2)
        assert "error" not in answer, answer
        nodes.signal("node-0", signal.SIGTERM)
        assert nodes.end(30) == (0, 0)
    steps = read_trace(tmp_path / "trace" / "rank-0.jsonl", StageTrace)
    assert max(step.ended_ns - step.started_ns for step in steps) >= 4 * LAYER_S * 1e9 > DEADLINE_S * 1e9
