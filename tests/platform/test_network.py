"""One interface for every channel: found from the route, checked against what the user has set."""

from __future__ import annotations

from pathlib import Path

import pytest

from rocm_serve.errors import UserError
from rocm_serve.platform.network import Interface, check_resolved, network_of, own_interface, socket_environment
from rocm_serve.platform.probe import bridge_is_inside, interfaces, numeric_host, source_address

LO = Interface("lo", ("127.0.0.1", "::1"), True)
FABRIC = Interface("eth1", ("10.0.0.1", "fe80::1"), True)
DOCKER = Interface("docker0", ("172.17.0.1",), True, inside=True)
HERE = (LO, DOCKER, FABRIC)


def test_node_0_takes_the_interface_that_bears_the_address_not_the_one_of_a_route_to_itself() -> None:
    network = network_of(0, "node0", "10.0.0.1", "127.0.0.1", HERE, {})
    assert (network.init_host, network.address, network.interface) == ("10.0.0.1", "10.0.0.1", "eth1")


def test_other_nodes_take_the_interface_of_the_route() -> None:
    network = network_of(1, "node0", "10.0.0.9", "10.0.0.1", HERE, {"GLOO_SOCKET_IFNAME": "eth1"})
    assert (network.init_host, network.address, network.interface) == ("10.0.0.9", "10.0.0.1", "eth1")


def test_all_of_127_is_the_loopbacks() -> None:
    assert own_interface("127.0.0.2", HERE) == LO
    assert own_interface("10.0.0.2", HERE) is None


@pytest.mark.parametrize(
    ("member", "init_host", "source", "gloo", "words"),
    [
        (0, "10.0.0.9", "10.0.0.1", None, ["node 0 must own 10.0.0.9", "eth1 10.0.0.1", "--node-rank"]),
        (1, "10.9.9.9", None, None, ["no route to 10.9.9.9"]),
        (1, "10.0.0.9", "10.0.0.1", "docker0", ["but eth1", "set GLOO_SOCKET_IFNAME=eth1"]),
        (1, "10.0.0.9", "10.0.0.1", "lo", ["set GLOO_SOCKET_IFNAME=eth1"]),
        (1, "10.0.0.9", "10.0.0.1", "eth9", ["no interface 'eth9'", "lo, docker0, eth1"]),
        (1, "10.0.0.9", "10.0.0.1", "^lo", ["exact names", "set GLOO_SOCKET_IFNAME=eth1"]),
        (1, "10.0.0.9", "10.0.0.1", "=eth1", ["exact names"]),
        (1, "10.0.0.9", "10.0.0.1", "eth", ["no interface 'eth'", "exact names"]),
        (1, "172.17.0.9", "172.17.0.1", None, ["no port of that bridge leaves this host", "eth1 10.0.0.1"]),
        (0, "172.17.0.1", None, None, ["docker0 bears", "no port of that bridge leaves this host"]),
    ],
)
def test_a_wrong_interface_is_refused_with_the_value_that_works(
    member: int, init_host: str, source: str | None, gloo: str | None, words: list[str]
) -> None:
    with pytest.raises(UserError) as refused:
        network_of(member, "node0", init_host, source, HERE, {} if gloo is None else {"GLOO_SOCKET_IFNAME": gloo})
    assert all(word in str(refused.value) for word in words), str(refused.value)


@pytest.mark.parametrize("variable", ["MORI_SOCKET_IFNAME", "TP_SOCKET_IFNAME"])
@pytest.mark.parametrize(
    ("wish", "words"), [("docker0", ["but eth1"]), ("=eth1", ["exact names"]), ("eth1,docker0", ["no interface"])]
)
def test_the_other_variables_with_exact_names_are_held_against_it_too(
    variable: str, wish: str, words: list[str]
) -> None:
    with pytest.raises(UserError) as refused:
        network_of(1, "node0", "10.0.0.9", "10.0.0.1", HERE, {variable: wish})
    told = str(refused.value)
    assert told.startswith(f"{variable}={wish}") and all(word in told for word in words)
    assert f"set {variable}=eth1 or leave it unset" in told
    network_of(1, "node0", "10.0.0.9", "10.0.0.1", HERE, {variable: "eth1"})


@pytest.mark.parametrize(
    ("ports", "inside"),
    [
        ({}, True),
        ({"veth1": []}, True),
        ({"veth1": [], "eth0": ["device"]}, False),
        ({"bond0": ["lower_eth0"]}, False),
        ({"vxlan0": ["DEVTYPE=vxlan"]}, False),
    ],
)
def test_a_bridge_is_inside_when_no_port_of_it_leaves_the_host(
    ports: dict[str, list[str]], inside: bool, tmp_path: Path
) -> None:
    (tmp_path / "br0" / "brif").mkdir(parents=True)
    for name, files in ports.items():
        (tmp_path / "br0" / "brif" / name).mkdir()
        (tmp_path / name).mkdir()
        (tmp_path / name / "uevent").write_text("INTERFACE=x\n" + "".join(f for f in files if "=" in f))
        for file in files:
            if "=" not in file:
                (tmp_path / name / file).mkdir()
    assert bridge_is_inside(tmp_path / "br0") is inside
    assert not bridge_is_inside(tmp_path / "veth1"), "no bridge at all"


@pytest.mark.parametrize("wish", ["", "eth", "eth1", "=eth1", "ib,eth", "^docker,lo", "^=eth", "=ib0,eth1"])
def test_what_nccl_would_take_as_the_right_interface_is_left_alone(wish: str) -> None:
    network_of(1, "node0", "10.0.0.9", "10.0.0.1", HERE, {"NCCL_SOCKET_IFNAME": wish})


@pytest.mark.parametrize(
    ("wish", "chosen"),
    [("docker", "docker0"), ("=eth", "no interface"), ("^eth", "lo, docker0"), ("^=eth1", "lo, docker0")],
)
def test_what_nccl_would_take_as_another_is_refused_with_the_value_that_works(wish: str, chosen: str) -> None:
    with pytest.raises(UserError) as refused:
        network_of(1, "node0", "10.0.0.9", "10.0.0.1", HERE, {"NCCL_SOCKET_IFNAME": wish})
    told = str(refused.value)
    assert (
        told.startswith(f"NCCL_SOCKET_IFNAME={wish} chooses {chosen} here, but eth1")
        and "set NCCL_SOCKET_IFNAME==eth1" in told
    )


def test_an_interface_that_is_down_is_refused() -> None:
    down = (LO, Interface("eth1", ("10.0.0.1",), False))
    with pytest.raises(UserError, match="eth1, which bears 10.0.0.1, is down"):
        network_of(1, "node0", "10.0.0.9", "10.0.0.1", down, {})


def test_a_host_name_that_means_this_host_only_is_refused_and_a_typed_loopback_is_a_wish() -> None:
    with pytest.raises(UserError, match="resolves the name to 127.0.1.1, which no other host can reach"):
        check_resolved("node0", "127.0.1.1")
    check_resolved("127.0.0.2", "127.0.0.2")
    check_resolved("localhost", "127.0.0.1")
    check_resolved("node0", "10.0.0.1")


def test_each_library_is_told_in_its_own_syntax_and_the_users_word_is_kept() -> None:
    told = socket_environment("eth1", {"NCCL_SOCKET_IFNAME": "eth"})
    assert told == {"GLOO_SOCKET_IFNAME": "eth1", "MORI_SOCKET_IFNAME": "eth1", "TP_SOCKET_IFNAME": "eth1"}
    assert socket_environment("eth1", {})["NCCL_SOCKET_IFNAME"] == "=eth1"


def test_the_machine_knows_its_loopback() -> None:
    assert source_address("127.0.0.1") == "127.0.0.1"
    found = own_interface("127.0.0.1", interfaces())
    assert found is not None and found.up and found.mtu > 0 and not found.inside
    assert numeric_host("127.0.0.7") == "127.0.0.7"
    with pytest.raises(UserError, match="no-such-host.invalid"):
        numeric_host("no-such-host.invalid")
