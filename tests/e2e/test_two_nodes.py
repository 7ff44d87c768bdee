"""Two nodes on one host: one process's bits, one orderly end, one death for all.

Most ways to die are scenes of tests/two_hosts, which needs the right to make network namespaces.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from rocm_serve.executor.heartbeat import Phase
from tests.e2e.harness import Server
from tests.e2e.two_nodes import TwoNodes, completion, free_ports, serving
from tests.made import small_checkpoint

pytestmark = pytest.mark.multirank

DEADLINE_S = 4
ENDED_S = 15.0  # what the product promises after it has noticed
SMALL = ["--mem-fraction", "0.3", "--max-model-len", "4096", "--max-running-requests", "4"]
PP2 = ["--tp", "1", "--pp", "2", *SMALL]
PROMPTS = [[5, 6, 7], list(range(100, 350)), [9] * 65]


@pytest.fixture(scope="session")
def four_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_checkpoint(tmp_path_factory.mktemp("two-nodes") / "tiny", "text-bf16", "bf16", seed=11)


@pytest.fixture(scope="module")
def alone(four_layers: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What one process answers."""
    with Server(four_layers, tmp_path_factory.mktemp("one"), SMALL) as one, one.client() as client:
        return answers(client)


def answers(client: Any) -> list[Any]:
    asked = {"max_tokens": 12, "logprobs": 3, "return_tokens_as_token_ids": True}
    given = [completion(client, prompt, **asked) for prompt in PROMPTS]
    assert all("choices" in answer for answer in given), given
    return [answer["choices"] for answer in given]


@contextmanager
def a_request(nodes: TwoNodes, prompt: list[int], **body: object) -> Iterator[list[dict[str, Any]]]:
    """Have a request open; what it was answered is in the list once the block is left."""
    got: list[dict[str, Any]] = []

    def ask() -> None:
        with nodes.client() as client:
            got.append(completion(client, prompt, **body))

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield got
    finally:
        thread.join(timeout=60)


def listening(nodes: TwoNodes) -> set[str]:
    """Addresses on which any process of either node takes connections."""
    family = [psutil.Process(node.process.pid) for node in nodes.nodes]
    family += [one for node in nodes.nodes for one in node.look()]
    found = {c.laddr.ip for one in family for c in one.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    assert found, "nobody listens"
    return found


def in_phase(nodes: TwoNodes, name: str, phase: Phase) -> Callable[[], bool]:
    def there() -> bool:
        seen = nodes.progress(name)
        return seen is not None and seen.phase is phase and (seen.step >= 0 or phase is Phase.LOADING)

    return there


def check_stacks(nodes: TwoNodes) -> None:
    """SIGUSR1 writes the stacks of any process to its log."""
    places = {"node-0": nodes.nodes[0].log_path, "node-1": nodes.nodes[1].log_path}
    for name, node in (("core", 0), ("rank-0", 0), ("rank-1", 1)):
        places[name] = Path(nodes.nodes[node].run_dir) / "logs" / f"{name}.log"
    for name in places:
        nodes.signal(name, signal.SIGUSR1)
    for name, log in places.items():
        nodes.until(lambda: "most recent call first" in log.read_text(), 10, f"no stacks of {name}")  # noqa: B023


def check_ended(nodes: TwoNodes) -> None:
    """Both nodes end with code 1, and nothing is left."""
    assert nodes.end(ENDED_S) == (1, 1)


def test_two_nodes_give_the_bits_of_one_process_show_their_stacks_and_end_by_a_sigterm_on_one(
    four_layers: Path, tmp_path: Path, alone: list[Any]
) -> None:
    with serving(four_layers, tmp_path / "two", PP2) as nodes:
        with nodes.client() as client:
            assert answers(client) == alone
        assert listening(nodes) <= {"127.0.0.1", "127.0.0.2"}, "nothing listens on every interface"
        check_stacks(nodes)
        with nodes.client() as client:
            assert answers(client) == alone, "and they serve on"
        nodes.signal("node-1", signal.SIGTERM)
        assert nodes.end(30) == (0, 0)


def test_a_killed_rank_on_the_other_node_is_health_503_an_error_object_and_the_end_of_both(
    four_layers: Path, tmp_path: Path
) -> None:
    with serving(four_layers, tmp_path, PP2) as nodes:
        with a_request(nodes, [5, 6, 7], max_tokens=2000) as got:
            nodes.until(in_phase(nodes, "rank-1", Phase.DECODE), 30, "no decode step")
            nodes.signal("rank-1", signal.SIGKILL)
            nodes.until(lambda: nodes.health() == 503, 10, "/health still well")  # 2 s on a quiet machine
        assert "rank-1 ended with signal SIGKILL" in got[0]["error"]["message"]
        assert " in step " in got[0]["error"]["message"], "it says where the rank was"
        check_ended(nodes)
        assert all("rank-1 ended with signal SIGKILL" in node.log for node in nodes.nodes)


@pytest.mark.by_hand  # in CI tests/two_hosts/test_failures_serving.py stops ranks
@pytest.mark.slow
def test_a_stopped_rank_is_found_by_the_step_deadline_and_shows_its_stack(four_layers: Path, tmp_path: Path) -> None:
    name, phase = "rank-1", Phase.DECODE
    flags = [*PP2, "--watchdog-timeout", str(DEADLINE_S)]
    with serving(four_layers, tmp_path, flags) as nodes:
        with a_request(nodes, [5] * 3, max_tokens=2000) as got:
            nodes.until(in_phase(nodes, name, phase), 30, f"no {phase.words} step")
            nodes.signal(name, signal.SIGSTOP)
            nodes.until(lambda: nodes.health() == 503, DEADLINE_S + 10, "/health still well")
        message = got[0]["error"]["message"]
        rank = name.replace("-", " ")
        assert message.startswith(f"{rank} has made no progress for {DEADLINE_S} s: step ")
        assert "stopped by a signal" in message
        check_ended(nodes)
        owner = nodes.nodes[int(name[-1])]
        assert f"[{name}] stacks" in owner.log and "most recent call first" in owner.log
        if f"({phase.words})" in message:  # else the step ended before the signal came
            assert "executor/worker.py" in owner.log and "in _run" in owner.log, "the stack says where in the step"


@pytest.mark.slow
def test_a_killed_core_ends_everything(four_layers: Path, tmp_path: Path) -> None:
    with serving(four_layers, tmp_path, PP2) as nodes:
        with a_request(nodes, [5, 6, 7], max_tokens=2000) as got:
            nodes.signal("core", signal.SIGKILL)
        check_ended(nodes)
        assert "error" in got[0]


@pytest.mark.slow
def test_a_frozen_supervisor_is_noticed_by_its_silence_and_a_stopped_core_by_the_deadline(
    four_layers: Path, tmp_path: Path
) -> None:
    with serving(four_layers, tmp_path / "silent", PP2) as nodes:
        nodes.signal("node-1", signal.SIGSTOP)
        nodes.until(lambda: nodes.health() == 503, 15, "/health still well")
        nodes.until(lambda: nodes.nodes[0].process.poll() is not None, ENDED_S, "node 0 lives on")
        assert nodes.nodes[0].process.returncode == 1 and "node 1 at 127.0.0.1" in nodes.nodes[0].log
        assert "has been silent" in nodes.nodes[0].log
        nodes.signal("node-1", signal.SIGCONT)
        check_ended(nodes)
    with serving(four_layers, tmp_path / "core", [*PP2, "--watchdog-timeout", str(DEADLINE_S)]) as nodes:
        nodes.signal("core", signal.SIGSTOP)
        nodes.until(lambda: nodes.health() == 503, DEADLINE_S + 10, "/health still well")
        check_ended(nodes)
        assert "the engine core has made no progress" in nodes.nodes[1].log


def test_a_node_that_waits_says_so_and_gives_up_after_dist_timeout(four_layers: Path, tmp_path: Path) -> None:
    nodes = TwoNodes(four_layers, tmp_path, [*PP2, "--dist-timeout", "7"])
    address = f"127.0.0.2:{free_ports()}"
    try:
        first = nodes.start_node(0, address)
        nodes.until(lambda: first.process.poll() is not None, 60, "it waits for ever")
        assert first.process.returncode == 1
        assert "waiting for node 1 of 2 at 127.0.0.2:" in first.log and "nothing has connected yet for 5 s" in first.log
        assert "gave up after --dist-timeout 7 s" in first.log
    finally:
        nodes.__exit__(None, None, None)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["node-0", "node-1"])
def test_a_sigterm_before_the_server_is_ready_is_an_orderly_end_of_both(
    four_layers: Path, tmp_path: Path, name: str
) -> None:
    with TwoNodes(four_layers, tmp_path, PP2) as nodes:
        nodes.until(lambda: all("have met and agree" in node.log for node in nodes.nodes), 60, "they did not meet")
        nodes.signal(name, signal.SIGTERM)
        assert nodes.end(40) == (0, 0)


@pytest.mark.by_hand  # in CI test_wrong_interface.py of two_hosts has nodes that differ, test_control.py the words
def test_nodes_that_differ_are_refused_on_both_sides_by_key(four_layers: Path, tmp_path: Path) -> None:
    nodes = TwoNodes(four_layers, tmp_path, PP2)
    address = f"127.0.0.2:{free_ports()}"
    try:
        nodes.start_node(0, address)
        nodes.start_node(1, address, "--page-size", "32", "--seed", "5")
        assert nodes.end(60) == (2, 2)
        for node in nodes.nodes:
            assert (
                "page-size: 16 on node 0, 32 on node 1; " in node.log and "seed: 0 on node 0, 5 on node 1" in node.log
            )
    finally:
        nodes.__exit__(None, None, None)


@pytest.mark.slow
def test_torchrun_starts_a_process_per_rank_and_the_first_serves(
    four_layers: Path, tmp_path: Path, alone: list[Any]
) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    launcher += ["--master-addr", "127.0.0.2", "--master-port", str(free_ports()), "--module"]
    nodes = TwoNodes(four_layers, tmp_path / "torchrun", PP2)
    try:
        nodes.start_by(launcher)
        nodes.await_ready()
        with nodes.client() as client:
            assert answers(client) == alone
        second = next(one for one in nodes.nodes[0].look() if supervises(one) and one.environ()["RANK"] == "1")
        second.send_signal(signal.SIGTERM)
        nodes.until(lambda: nodes.nodes[0].process.poll() is not None, 40, "torchrun did not end")
        assert nodes.nodes[0].process.returncode == 0
    finally:
        nodes.__exit__(None, None, None)


def supervises(one: psutil.Process) -> bool:
    return "serve" in one.cmdline() and "torch.distributed.run" not in one.cmdline()
