"""What the preflight finds, from trees and tables: each failure says what to set, and nothing else fails."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rocm_serve.diagnostics.preflight import NEEDS_SHM, Finding, Place, failures, judge
from rocm_serve.errors import UserError
from rocm_serve.platform.host import HostFacts
from rocm_serve.platform.network import Interface, Network
from rocm_serve.platform.probe import host_facts
from rocm_serve.platform.rdma import read_ports
from tests.platform.fabric import V4, V6_OF_V2, make_device, make_gpu_host

LO = Interface("lo", ("127.0.0.1",), True, 65536)
ETH = Interface("eth1", ("10.0.0.2", "fe80::2"), True, 9000)
OTHER = Interface("eth0", ("192.168.1.2",), True, 1500)
HERE = (LO, OTHER, ETH)
NETWORK = Network("10.0.0.1", "10.0.0.2", "eth1", 9000, {"interface": "the route to 10.0.0.1 takes it"})
PRESET = {"FABRIC": "cx7", "NCCL_IB_HCA": "mlx5_", "NCCL_IB_GID_INDEX": "3", "NCCL_NET": "IB"}
NODE_1 = Place(1, "10.0.0.1")
LAPTOP = HostFacts("n1", "10.0.0.2", False, 8 << 20, 8 << 20, False, 64 << 20, 0, (), 1)


def gpu_host(root: Path) -> HostFacts:
    """A host with GPUs and eight cards, all in order."""
    for i in range(8):
        make_device(root, f"mlx5_{i}")
    return replace(LAPTOP, has_gpu=True, memlock_soft=None, memlock_hard=None, shm_free=NEEDS_SHM, rdma_files=8,
                   rdma_ports=read_ports(root), numa_balancing=0)  # fmt: skip


def findings(facts: HostFacts = LAPTOP, **environ: str) -> list[Finding]:
    return judge(NODE_1, NETWORK, HERE, facts, environ, None)


def the_one(found: list[Finding], level: str) -> str:
    """The sentence of the only finding of a level that is worth reading."""
    (sentence,) = [one.sentence for one in found if one.level == level]
    return sentence


def test_without_gpus_only_the_network_is_judged_and_what_was_left_out_is_named() -> None:
    found = findings()
    assert not failures(found) and not [one for one in found if one.level == "warn"]
    assert {one.topic for one in found if one.level == "not looked at"} == {"memlock, /dev/shm", "RDMA"}
    assert all("no GPU here" in one.sentence for one in found if one.level == "not looked at")


def test_a_host_in_order_has_nothing_to_mend_and_says_which_variables_are_set(tmp_path: Path) -> None:
    found = findings(gpu_host(tmp_path), **PRESET)
    assert {one.level for one in found} == {"ok"}, found
    route = found[0].sentence
    assert route.startswith("eth1, 10.0.0.2, MTU 9000: the route to 10.0.0.1 takes it")
    assert "GLOO_SOCKET_IFNAME=eth1 NCCL_SOCKET_IFNAME==eth1 MORI_SOCKET_IFNAME=eth1" in route
    assert "NCCL_IB_HCA=mlx5_: 8 ports ACTIVE, mlx5_0, " in " ".join(one.sentence for one in found)


def test_no_network_is_one_failure_in_the_words_of_the_search() -> None:
    found = judge(NODE_1, UserError("no route to 10.0.0.1"), HERE, LAPTOP, {"GLOO_SOCKET_IFNAME": "x"}, None)
    assert the_one(found, "fail") == "no route to 10.0.0.1"


def test_every_wrong_variable_is_told_not_only_the_first() -> None:
    found = findings(
        GLOO_SOCKET_IFNAME="^lo", NCCL_SOCKET_IFNAME="eth0", MORI_SOCKET_IFNAME="eth0", TP_SOCKET_IFNAME=""
    )
    told = [one.sentence for one in failures(found)]
    assert [line.partition("=")[0] for line in told] == [
        *("GLOO_SOCKET_IFNAME", "MORI_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    ]
    assert all(f"set {line.partition('=')[0]}=" in line and "eth1" in line for line in told)


def test_a_variable_that_is_right_is_said_to_be() -> None:
    found = findings(GLOO_SOCKET_IFNAME="eth1", NCCL_SOCKET_IFNAME="eth1,ib")
    assert not failures(found)
    assert [one.sentence for one in found if one.topic == "variables"] == [
        "GLOO_SOCKET_IFNAME=eth1 chooses eth1",
        "NCCL_SOCKET_IFNAME=eth1,ib chooses eth1",
    ]


def test_the_loopback_is_refused_unless_it_is_meant() -> None:
    network = Network("127.0.0.1", "127.0.0.1", "lo", 65536, {"interface": "bears the address"})
    for rank in (0, 1):
        found = judge(Place(rank, "127.0.0.1"), network, HERE, LAPTOP, {}, None)
        assert "this host's own loopback (lo): no other node reaches it" in the_one(found, "fail")
        assert not failures(judge(Place(rank, "127.0.0.1", True), network, HERE, LAPTOP, {}, None))


def test_a_second_node_that_bears_node_0s_address_is_refused() -> None:
    both = Network("10.0.0.2", "10.0.0.2", "eth1", 9000, {"interface": "x"})
    sentence = the_one(judge(Place(1, "10.0.0.2"), both, HERE, LAPTOP, {}, None), "fail")
    assert "this is node 1, and eth1 here bears 10.0.0.2 itself (as docker0 does on every host)" in sentence
    assert not failures(judge(Place(0, "10.0.0.2"), both, HERE, LAPTOP, {}, None))


def test_an_interface_whose_first_address_is_another_is_a_warning() -> None:
    two = Interface("eth1", ("192.168.9.2", "10.0.0.2"), True, 9000)
    found = judge(NODE_1, NETWORK, (LO, two), LAPTOP, {}, None)
    assert "use the first address of eth1, 192.168.9.2, not 10.0.0.2" in the_one(found, "warn")


@pytest.mark.parametrize(("address", "how"), [(None, "does not resolve"), ("127.0.1.1", "resolves to 127.0.1.1")])
def test_a_hostname_that_no_other_host_could_use_is_a_warning_that_says_it_is_harmless(
    address: str | None, how: str
) -> None:
    sentence = the_one(findings(replace(LAPTOP, hostname_address=address)), "warn")
    assert f"n1 {how} here; harmless to this server" in sentence and "/etc/hosts" in sentence


def test_a_taken_port_of_node_0_is_a_failure() -> None:
    found = judge(Place(0, "10.0.0.2"), NETWORK, HERE, LAPTOP, {}, "cannot listen on 10.0.0.2:29501: x; must be free")
    assert "10.0.0.2:29501" in the_one(found, "fail") and "another port (PORT0)" in the_one(found, "fail")


@pytest.mark.parametrize(
    ("changes", "topic", "words"),
    [
        ({"memlock_soft": 8 << 20}, "memlock", ["limited to 8192 KiB", "ulimit -l unlimited before the start"]),
        ({"memlock_soft": 8 << 20, "memlock_hard": 8 << 20}, "memlock", ["docker run --ulimit memlock=-1"]),
        ({"shm_free": 64 << 20}, "/dev/shm", ["has 64 MiB free, RCCL wants 8192", "--shm-size"]),
        ({"shm_free": None}, "/dev/shm", ["has 0 MiB free"]),
        ({"rdma_files": 0}, "RDMA", ["8 RDMA ports, but no /dev/infiniband/uverbs*", "--device /dev/infiniband"]),
        ({"rdma_ports": ()}, "RDMA", ["no RDMA device in /sys/class/infiniband", "NCCL_IB_DISABLE=1"]),
    ],
)
def test_what_a_gpu_host_lacks_is_a_failure_with_its_remedy(
    changes: dict[str, object], topic: str, words: list[str], tmp_path: Path
) -> None:
    (bad,) = failures(findings(replace(gpu_host(tmp_path), **changes), **PRESET))  # type: ignore[arg-type]
    assert bad.topic == topic and all(word in bad.sentence for word in words), bad.sentence


def test_a_limit_on_locked_memory_does_not_bind_who_may_lock(tmp_path: Path) -> None:
    may = replace(gpu_host(tmp_path), memlock_soft=8 << 20, memlock_hard=8 << 20, may_lock=True)
    assert not failures(findings(may, **PRESET))


def test_numa_balancing_is_a_warning(tmp_path: Path) -> None:
    sentence = the_one(findings(replace(gpu_host(tmp_path), numa_balancing=1), **PRESET), "warn")
    assert "sysctl kernel.numa_balancing=0" in sentence


@pytest.mark.parametrize(
    ("environ", "level", "words"),
    [
        ({"FABRIC": "thor2"}, "fail", ["FABRIC=thor2 is not for the cards of this node", "set FABRIC=cx7"]),
        ({"NCCL_IB_HCA": "bnxt_re"}, "fail", ["NCCL_IB_HCA=bnxt_re chooses none of mlx5_0, "]),
        ({"NCCL_IB_GID_INDEX": "1"}, "fail", ["row 1: RoCE v2, fe80::1 (link-local)", "here: NCCL_IB_GID_INDEX=3"]),
        ({"NCCL_IB_GID_INDEX": "2"}, "fail", ["row 2: IB/RoCE v1, 10.0.0.1", "right here: NCCL_IB_GID_INDEX=3"]),
        ({"NCCL_IB_GID_INDEX": "7"}, "fail", ["no address in row 7", "right here: NCCL_IB_GID_INDEX=3"]),
        ({"NCCL_IB_GID_INDEX": "three"}, "fail", ["'three' is no number"]),
        ({"NCCL_IB_DISABLE": "1"}, "fail", ["NCCL_IB_DISABLE=1 and NCCL_NET=IB contradict"]),
        ({"NCCL_IB_DISABLE": "1", "NCCL_NET": ""}, "warn", ["NCCL_IB_DISABLE=1", "ten times slower"]),
        ({"NCCL_NET": "Socket"}, "warn", ["NCCL_NET=Socket", "ten times slower"]),
    ],
)  # fmt: skip
def test_a_variable_that_does_not_suit_the_cards_is_told_with_what_does(
    environ: dict[str, str], level: str, words: list[str], tmp_path: Path
) -> None:
    found = [one for one in findings(gpu_host(tmp_path), **{**PRESET, **environ}) if one.level in ("fail", "warn")]
    assert {one.level for one in found} == {level} and len(found) == 1, found
    assert all(word in found[0].sentence for word in words), found[0].sentence


def test_rdma_is_not_looked_at_when_it_is_switched_off(tmp_path: Path) -> None:
    found = findings(replace(gpu_host(tmp_path), rdma_ports=(), rdma_files=0), NCCL_IB_DISABLE="1")
    assert not failures(found)
    assert [one.sentence for one in found if one.level == "not looked at"] == ["NCCL_IB_DISABLE=1 is set"]


def test_without_a_preset_the_right_one_is_named(tmp_path: Path) -> None:
    assert "FABRIC=cx7" in the_one(findings(gpu_host(tmp_path)), "warn")
    make_device(tmp_path, "bnxt_re0", vendor="0x14e4", rate="100 Gb/sec")
    mixed = replace(gpu_host_again(tmp_path), rdma_ports=read_ports(tmp_path))
    told = [one.sentence for one in findings(mixed) if one.level == "warn"]
    assert "cards of several makers" in told[0] and "mixes rates" in told[1]
    assert not failures(findings(mixed, **PRESET)), "the preset chooses the cards of one maker"


def gpu_host_again(root: Path) -> HostFacts:
    return replace(LAPTOP, has_gpu=True, memlock_soft=None, shm_free=NEEDS_SHM, rdma_files=9, numa_balancing=0)


@pytest.mark.parametrize(
    ("wish", "level"), [("mlx5_", "warn"), ("=mlx5_0,mlx5_9", "fail"), ("=mlx5_9", "fail"), ("^=mlx5_9", None)]
)
def test_a_card_that_is_down_is_a_failure_only_where_it_was_named(wish: str, level: str | None, tmp_path: Path) -> None:
    gpu_host(tmp_path)
    make_device(tmp_path, "mlx5_9", state="DOWN")
    facts = replace(gpu_host_again(tmp_path), rdma_ports=read_ports(tmp_path))
    found = [one for one in findings(facts, **{**PRESET, "NCCL_IB_HCA": wish}) if one.level in ("warn", "fail")]
    assert [one.level for one in found] == ([level] if level else [])
    assert all("mlx5_9 DOWN" in one.sentence for one in found)


def test_rows_that_differ_between_cards_are_named_card_by_card(tmp_path: Path) -> None:
    make_device(tmp_path, "mlx5_0", rows={3: V4})
    make_device(tmp_path, "mlx5_1", rows={1: V6_OF_V2, 5: V4})
    make_device(tmp_path, "mlx5_2", rows={1: V6_OF_V2})
    facts = replace(gpu_host_again(tmp_path), rdma_ports=read_ports(tmp_path))
    sentence = the_one(findings(facts, **PRESET), "fail")
    assert "mlx5_1 has no address in row 3; mlx5_2 has no address in row 3" in sentence
    assert "right here: mlx5_0 3, mlx5_1 5, mlx5_2 none (a port without one has no IPv4 address" in sentence


def test_infiniband_needs_no_row(tmp_path: Path) -> None:
    make_device(tmp_path, "mlx5_0", link="InfiniBand", rows={0: V6_OF_V2})
    facts = replace(gpu_host_again(tmp_path), rdma_ports=read_ports(tmp_path))
    assert not [one for one in findings(facts, **PRESET) if one.topic == "GID row"]


def test_ionic_cards_want_their_provider_and_rccls_path(tmp_path: Path) -> None:
    make_device(tmp_path, "rdma0", vendor="0x1dd8", rows={1: V4})
    facts = replace(gpu_host_again(tmp_path), rdma_ports=read_ports(tmp_path))
    preset = {"FABRIC": "ainic", "NCCL_IB_HCA": "rdma", "NCCL_IB_GID_INDEX": "1"}
    told = [one.sentence for one in findings(facts, **preset) if one.level == "warn"]
    assert told[0].startswith("IBV_DRIVERS=ionic is not set") and told[1].startswith("RCCL_AINIC_ROCE=1 is not set")
    assert {one.level for one in findings(facts, **preset, IBV_DRIVERS="ionic", RCCL_AINIC_ROCE="1")} == {"ok"}


def test_a_host_is_read_from_its_trees(tmp_path: Path) -> None:
    make_gpu_host(tmp_path, numa_balancing=1)
    make_device(tmp_path, "mlx5_0")
    facts = host_facts(tmp_path)
    assert facts.has_gpu and facts.may_lock and facts.numa_balancing == 1 and facts.rdma_files == 1
    assert [one.device for one in facts.rdma_ports] == ["mlx5_0"] and (facts.shm_free or 0) > 0
    assert facts.hostname
    bare = host_facts(tmp_path / "nothing")
    assert (bare.has_gpu, bare.may_lock, bare.numa_balancing, bare.shm_free) == (False, False, None, None)
