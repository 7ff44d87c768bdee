"""Every wrong interface, route and port that makes gloo or RCCL hang: found on both hosts, with what to set.

Where the other host can be told, it is. Each scene ends on both with exit code 2, within FOUND_S from when both are up.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.e2e.two_nodes import Node, completion
from tests.two_hosts.namespaces import ADDRESSES, INTERFACE, Host, TwoHosts, ip
from tests.two_hosts.nodes import PP2, TwoHostNodes, serving

pytestmark = pytest.mark.multirank

START_S = 120.0  # for two interpreters each, one after the other: 1 s on a quiet machine
FOUND_S = 20.0
PORT = 29500
CONTROL = PORT + 3
NODE_0, NODE_1 = ADDRESSES
GLOO, NCCL, MORI = (f"{name}_SOCKET_IFNAME" for name in ("GLOO", "NCCL", "MORI"))
WITHOUT_PREFLIGHT = {"PREFLIGHT": "off"}
T = TypeVar("T")


@dataclass
class Scene:
    """What is wrong (`env` by node, RANK0_ADDR) and what each node says about it.

    `first`: what the first node that is started says before the other one is.
    """

    said: tuple[Sequence[str], Sequence[str]]
    env: tuple[Mapping[str, str], Mapping[str, str]] = ({}, {})
    address: str = NODE_0
    flags: Sequence[str] = field(default_factory=lambda: PP2)
    first: str = ""

    def play(self, hosts: TwoHosts, model: Path, work_dir: Path, ranks: tuple[int, int] = (0, 1)) -> float:
        """Start both, see both end in time with the words; return how long it took."""
        nodes = TwoHostNodes(model, work_dir, self.flags, env=dict(enumerate(self.env)), hosts=hosts)
        began = time.monotonic()
        with held(nodes):
            for host, rank in enumerate(ranks):
                start(nodes, hosts.hosts[host], rank, self.address)
                nodes.until(lambda: self.first in nodes.nodes[0].log, START_S, f"nobody says {self.first!r}")
            nodes.until(lambda: all(map(is_up, nodes.nodes)), START_S, "the nodes did not come up")
            codes = nodes.end(FOUND_S)
            took = time.monotonic() - began
            assert codes == (2, 2)
            for node in nodes.nodes:
                for words in self.said[node.rank]:
                    assert words in node.log, f"node {node.rank} does not say {words!r}"
                assert "Traceback" not in node.log
        print(f"took {took:.1f} s")
        return took


@contextmanager
def held(nodes: TwoHostNodes) -> Iterator[None]:
    """End whatever is left, and show the outputs when anything was wrong."""
    try:
        yield
    except BaseException as error:
        nodes.__exit__(type(error), error, None)
        raise
    nodes.__exit__(None, None, None)


def start(nodes: TwoHostNodes, host: Host, rank: int, address: str) -> None:
    """Start two_node.sh for a rank on a host, which need not be that of its own number."""
    nodes.start_node(rank, address, on=host)


def is_up(node: Node) -> bool:
    """Whether a node has started as far as it will: it meets the other one, has found something, or has ended."""
    up = ": rocm-serve version " in node.log or "not ready: " in node.log
    return up or node.process.poll() is not None


def both(*words: str) -> tuple[Sequence[str], Sequence[str]]:
    return words, words


@contextmanager
def taken(host: Host, port: int) -> Iterator[None]:
    """Have another program listen on a port of the host."""
    with host.inside():
        other = socket.socket()
    with contextlib.closing(other):
        other.bind((host.address, port))
        other.listen()
        yield


def second_cable(hosts: TwoHosts) -> None:
    """Join the two hosts by another pair, eth1, in a network of its own."""
    first, second = hosts.hosts
    ip("link", "add", "eth1", "netns", first.name, "type", "veth", "peer", "eth1", "netns", second.name)
    for host, address in zip(hosts.hosts, ("10.78.0.1", "10.78.0.2"), strict=True):
        ip("-n", host.name, "address", "add", f"{address}/24", "dev", "eth1")
        ip("-n", host.name, "link", "set", "eth1", "up")


def docker0(host: Host) -> None:
    """Give a host the bridge that Docker makes, with Docker's address."""
    ip("-n", host.name, "link", "add", "docker0", "type", "bridge")
    ip("-n", host.name, "address", "add", "172.17.0.1/16", "dev", "docker0")
    ip("-n", host.name, "link", "set", "docker0", "up")


def drop(host: Host, port: int) -> None:
    """Let nothing leave that comes from a port of this host, as a firewall that drops."""
    ip("-n", host.name, "rule", "add", "pref", "10", "ipproto", "tcp", "sport", str(port), "blackhole")


def not_starting(rank: int, *words: str) -> tuple[Sequence[str], Sequence[str]]:
    """Node `rank` says the words, and the other one that this node does not start because of them."""
    told = [f"node {rank} does not start: ", *words]
    return (words, told) if rank == 0 else (told, words)


# --- variables: rows 2 to 5 of what was measured with gloo, where the hosts hung for a minute ------------------------

REMEDY = f"set {GLOO}={INTERFACE} or leave it unset"
EXACT = "(gloo takes exact names"
VARIABLES = {
    "gloo-lo-on-both": Scene(both(f"{GLOO}=lo, but {INTERFACE}", REMEDY), ({GLOO: "lo"}, {GLOO: "lo"})),
    "gloo-other-interface-on-1": Scene(
        not_starting(1, f"{GLOO}=docker0, but {INTERFACE}", REMEDY), ({}, {GLOO: "docker0"})
    ),
    "gloo-other-interface-on-0": Scene(
        not_starting(0, f"{GLOO}=docker0, but {INTERFACE}", REMEDY), ({GLOO: "docker0"}, {})
    ),
    "gloo-no-such-interface": Scene(not_starting(1, f"{GLOO}=ib9: no interface 'ib9'", REMEDY), ({}, {GLOO: "ib9"})),
    "gloo-exclusion": Scene(not_starting(1, f"{GLOO}=^lo: no interface '^lo' {EXACT}", REMEDY), ({}, {GLOO: "^lo"})),
    "gloo-prefix": Scene(not_starting(0, f"{GLOO}=eth: no interface 'eth' {EXACT}", REMEDY), ({GLOO: "eth"}, {})),
    "nccl-other-interface": Scene(
        not_starting(1, f"{NCCL}=docker chooses docker0 here", f"set {NCCL}=={INTERFACE}"), ({}, {NCCL: "docker"})
    ),
    "mori-other-interface": Scene(
        not_starting(0, f"{MORI}=docker0, but {INTERFACE}", f"set {MORI}={INTERFACE}"), ({MORI: "docker0"}, {})
    ),
}

WITHOUT_TOO = [
    "gloo-lo-on-both",
    "gloo-other-interface-on-1",
    "gloo-other-interface-on-0",
]  # without the preflight, too


def by_hand(values: Sequence[T], left: Sequence[T]) -> list[Any]:
    """Values as parameters; those that are `left` run by hand only."""
    return [pytest.param(value, marks=pytest.mark.by_hand if value in left else ()) for value in values]


# What is said of other values and of the other libraries' variables, tests/platform/test_network.py holds in process.
@pytest.mark.parametrize("name", by_hand([*VARIABLES], [name for name in VARIABLES if name not in WITHOUT_TOO]))
def test_a_variable_that_names_another_interface(name: str, four_layers: Path, tmp_path: Path, hosts: TwoHosts) -> None:
    for host in hosts.hosts:
        docker0(host)
    VARIABLES[name].play(hosts, four_layers, tmp_path)


@pytest.mark.parametrize("name", WITHOUT_TOO)
def test_the_server_itself_finds_it_without_the_preflight(
    name: str, four_layers: Path, tmp_path: Path, hosts: TwoHosts
) -> None:
    for host in hosts.hosts:
        docker0(host)
    scene = VARIABLES[name]
    env = (dict(scene.env[0]) | WITHOUT_PREFLIGHT, dict(scene.env[1]) | WITHOUT_PREFLIGHT)
    Scene(scene.said, env).play(hosts, four_layers, tmp_path)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_setting_that_is_illegal_on_one_node_ends_both(
    rank: int, four_layers: Path, tmp_path: Path, hosts: TwoHosts
) -> None:
    env: tuple[Mapping[str, str], Mapping[str, str]] = ({}, {"ROCM_SERVE_PAGE_SIZE": "3"})
    said = not_starting(rank, "--page-size 3: legal: powers of two")
    Scene(said, env if rank else env[::-1]).play(hosts, four_layers, tmp_path)


# --- names and addresses ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "own_name", by_hand(["127.0.1.1", None], [None])
)  # both in tests/diagnostics/test_preflight.py
def test_hostnames_that_mean_127_or_nothing_do_no_harm(
    own_name: str | None, four_layers: Path, tmp_path: Path, hosts: TwoHosts
) -> None:
    for host in hosts.hosts:
        host.resolve("127.0.0.1 localhost\n" + (f"{own_name} {host.name}\n" if own_name else ""))
    with serving(four_layers, tmp_path, PP2, hosts) as nodes:
        with nodes.client() as client:
            assert "choices" in completion(client, [5, 6, 7], max_tokens=2)
        for node in nodes.nodes:
            how = f"resolves to {own_name}" if own_name else "does not resolve"
            assert f"{hosts.hosts[node.rank].name} {how} here; harmless to this server" in node.log
            assert f"{GLOO}={INTERFACE}" in node.log, "never lo, also where node 0's route to its own address takes it"


def test_node_0s_name_that_is_127_on_both(four_layers: Path, tmp_path: Path, hosts: TwoHosts) -> None:
    name = hosts.hosts[0].name
    for host in hosts.hosts:
        host.resolve(f"127.0.0.1 localhost\n127.0.1.1 {name}\n")
    words = "this host resolves the name to 127.0.1.1, which no other host can reach"
    Scene(both(words, "give the address of the interface"), address=name).play(hosts, four_layers, tmp_path)


def test_a_name_that_nobody_knows(four_layers: Path, tmp_path: Path, hosts: TwoHosts) -> None:
    Scene(both("--dist-init-addr head.invalid: "), address="head.invalid").play(hosts, four_layers, tmp_path)


def test_the_address_of_docker0_which_both_hosts_have(four_layers: Path, tmp_path: Path, hosts: TwoHosts) -> None:
    for host in hosts.hosts:
        docker0(host)
    words = (
        ("no port of that bridge leaves this host", f"{INTERFACE} {NODE_0}"),
        ("172.17.0.1", f"{INTERFACE} {NODE_1}"),
    )
    Scene(words, address="172.17.0.1").play(hosts, four_layers, tmp_path)


def test_the_address_of_docker0_which_only_node_0_has(four_layers: Path, tmp_path: Path, hosts: TwoHosts) -> None:
    docker0(hosts.hosts[0])
    words = ["no port of that bridge leaves this host"], ["this host has no route to 172.17.0.1"]
    Scene(words, address="172.17.0.1").play(hosts, four_layers, tmp_path)


def test_an_address_that_both_hosts_have(four_layers: Path, tmp_path: Path, hosts: TwoHosts) -> None:
    second_cable(hosts)
    for host in hosts.hosts:
        ip("-n", host.name, "address", "add", "192.168.9.1/32", "dev", "eth1")
    nodes = TwoHostNodes(four_layers, tmp_path, PP2, hosts=hosts)
    with held(nodes):
        for rank in (0, 1):
            nodes.start_node(rank, "192.168.9.1")
        nodes.until(lambda: all(map(is_up, nodes.nodes)), START_S, "the nodes did not come up")
        nodes.until(lambda: nodes.nodes[1].process.poll() is not None, FOUND_S, "node 1 does not find it")
        assert nodes.nodes[1].process.returncode == 2
        assert "this is node 1, and eth1 here bears 192.168.9.1 itself" in nodes.nodes[1].log
        # Nothing of node 1 ever reaches node 0, which cannot tell that from a node that was not started.
        nodes.until(lambda: "nothing has connected yet" in nodes.nodes[0].log, FOUND_S, "node 0 says nothing")


def test_node_ranks_that_are_swapped(four_layers: Path, tmp_path: Path, hosts: TwoHosts) -> None:
    said = [f"node 0 must own {NODE_0}", "another --node-rank?"], [f"here bears {NODE_0} itself", "is this node 0?"]
    Scene(said).play(hosts, four_layers, tmp_path, ranks=(1, 0))


def test_an_address_that_nobody_has(four_layers: Path, tmp_path: Path, hosts: TwoHosts) -> None:
    said = ["node 0 must own 10.77.0.9"], ["calls 10.77.0.9 and has had no answer", "may be a wrong address"]
    Scene(said, address="10.77.0.9").play(hosts, four_layers, tmp_path)


def test_an_interface_that_is_down(four_layers: Path, tmp_path: Path, hosts: TwoHosts) -> None:
    hosts.cut(1)
    said = [f"interface {INTERFACE}, which bears {NODE_0}, is down"], [f"this host has no route to {NODE_0}"]
    Scene(said).play(hosts, four_layers, tmp_path)


# --- routes, firewalls, ports, MTU -----------------------------------------------------------------------------------


def test_a_way_back_that_leaves_by_another_interface(four_layers: Path, tmp_path: Path, hosts: TwoHosts) -> None:
    second_cable(hosts)
    ip("-n", hosts.hosts[0].name, "route", "add", f"{NODE_1}/32", "via", "10.78.0.2", "dev", "eth1")
    words = f"node 0 reaches node 1 at {NODE_1} from 10.78.0.1, not from {NODE_0}"
    Scene(both(words, "give 10.78.0.1 there, or a route")).play(hosts, four_layers, tmp_path)


@pytest.mark.parametrize("port", by_hand([PORT, PORT + 1], [PORT + 1]))
def test_a_second_channel_that_leaves_by_another_interface(
    port: int, four_layers: Path, tmp_path: Path, hosts: TwoHosts
) -> None:
    second_cable(hosts)
    second = hosts.hosts[1].name
    ip("-n", second, "rule", "add", "pref", "10", "ipproto", "tcp", "dport", str(port), "lookup", "100")
    ip("-n", second, "route", "add", f"{NODE_0}/32", "via", "10.78.0.1", "dev", "eth1", "table", "100")
    words = f"node 1 reaches {NODE_0} from {NODE_1} on port {CONTROL} but from 10.78.0.2 on port {port}"
    Scene(both(words, "remove it, or give an address in the network of 10.78.0.2")).play(hosts, four_layers, tmp_path)


def test_no_way_back(four_layers: Path, tmp_path: Path, hosts: TwoHosts) -> None:
    second = hosts.hosts[1].name
    ip("-n", second, "address", "flush", "dev", INTERFACE)
    ip("-n", second, "address", "add", "10.99.0.2/32", "dev", INTERFACE)
    ip("-n", second, "route", "add", f"{NODE_0}/32", "dev", INTERFACE, "src", "10.99.0.2")
    words = f"node 1 at 10.99.0.2 calls {NODE_0} and has had no answer"
    Scene(both(words, "node 0 has no route back to 10.99.0.2")).play(hosts, four_layers, tmp_path)


# Each of the doors, shut in every way, is in tests/test_doors.py.
@pytest.mark.parametrize("port", by_hand([PORT, PORT + 1, PORT + 2, CONTROL], [PORT + 1, PORT + 2]))
def test_a_firewall_on_one_of_the_four_ports(port: int, four_layers: Path, tmp_path: Path, hosts: TwoHosts) -> None:
    drop(hosts.hosts[0], port)
    other = PORT if port == CONTROL else CONTROL
    words = f"node 1 reaches {NODE_0} on port {other} but not on {port} (timed out): a firewall, or another program on"
    Scene(both(words, f"Ports {PORT} to {CONTROL} must be open")).play(hosts, four_layers, tmp_path)


def test_a_firewall_before_node_1(four_layers: Path, tmp_path: Path, hosts: TwoHosts) -> None:
    second = hosts.hosts[1].name
    # Answers of node 1 to calls of node 0 are lost: those that come from ports that others chose.
    ip("-n", second, "rule", "add", "pref", "10", "ipproto", "tcp", "dport", "32768-60999", "blackhole")
    words = f"node 0 cannot reach node 1 at {NODE_1} (timed out)"
    Scene(both(words, "a firewall, or another route back")).play(hosts, four_layers, tmp_path)


# Each of the four ports is in tests/test_doors.py.
@pytest.mark.parametrize(
    ("port", "env"),
    [
        pytest.param(PORT + 1, {}, id="29501-preflight"),
        pytest.param(CONTROL, WITHOUT_PREFLIGHT, id="29503-server"),
        pytest.param(PORT + 1, WITHOUT_PREFLIGHT, id="29501-server", marks=pytest.mark.by_hand),
        pytest.param(CONTROL, {}, id="29503-preflight", marks=pytest.mark.by_hand),
    ],
)
def test_a_port_that_another_program_has(
    port: int, env: Mapping[str, str], four_layers: Path, tmp_path: Path, hosts: TwoHosts
) -> None:
    told = [f"cannot listen on {NODE_0}:{port}: Address already in use", "PORT to PORT+3 must be free"]
    # Behind the control port node 1 finds the other program, or is told by another door before that.
    at_1 = ["node 0 does not start: ", *told] if port != CONTROL else [f"{NODE_0}"]
    with taken(hosts.hosts[0], port):
        # Had node 1 found it and left before, node 0 would tell nobody for a minute.
        Scene((told, at_1), (env, env), first="telling the other nodes").play(hosts, four_layers, tmp_path)


def test_mtus_that_differ(four_layers: Path, tmp_path: Path, hosts: TwoHosts) -> None:
    ip("-n", hosts.hosts[1].name, "link", "set", INTERFACE, "mtu", "1400")
    words = "node 0 and node 1 differ; mtu: 1500 on node 0, 1400 on node 1; give the interfaces"
    Scene(both(words, "ip link set dev NAME mtu BYTES")).play(hosts, four_layers, tmp_path)


def test_an_mtu_that_the_network_does_not_take(four_layers: Path, tmp_path: Path, hosts: TwoHosts) -> None:
    first, second = (host.name for host in hosts.hosts)
    # Node 1 believes in packets of 9000 bytes and node 0 does not contradict it; what is longer than 1500 is lost.
    ip("-n", second, "link", "set", INTERFACE, "mtu", "9000", "gso_max_segs", "1")
    ip("-n", first, "route", "change", "10.77.0.0/24", "dev", INTERFACE, "src", NODE_0, "advmss", "8900")
    words = "small packets come, but large ones do not: the MTU"
    Scene(both(words, "ip link set dev NAME mtu 1500")).play(hosts, four_layers, tmp_path)


def test_another_checkpoint_is_told_on_both_and_each_says_what_it_has(
    four_layers: Path, tmp_path: Path, hosts: TwoHosts
) -> None:
    said = both("config.json ", "rocm-serve source ", "node 0 and node 1 differ; page-size: 16 on node 0, 32 on node 1")
    nodes = TwoHostNodes(four_layers, tmp_path, PP2, hosts=hosts)
    with held(nodes):
        nodes.start_node(0, NODE_0)
        nodes.start_node(1, NODE_0, "--page-size", "32")
        nodes.until(lambda: all(map(is_up, nodes.nodes)), START_S, "the nodes did not come up")
        assert nodes.end(FOUND_S) == (2, 2)
        for node in nodes.nodes:
            assert f"node {node.rank} at {ADDRESSES[node.rank]} on {INTERFACE}: rocm-serve version " in node.log
            assert all(words in node.log for words in said[node.rank])
