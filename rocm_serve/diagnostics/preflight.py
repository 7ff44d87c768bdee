"""Is this host ready to be one of several? Judged by what platform/probe.py has seen and by the environment. Pure.

Each finding that is not "ok" says what to set. What only a launch on GPUs needs is judged only where there are GPUs.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rocm_serve.diagnostics.preflight_rdma import rdma_findings
from rocm_serve.errors import UserError
from rocm_serve.platform.host import HostFacts
from rocm_serve.platform.network import (
    EXACT,
    Interface,
    Network,
    check_exact,
    check_nccl,
    own_interface,
    socket_environment,
)

Level = Literal["ok", "warn", "fail", "not looked at"]
NEEDS_SHM = 8 << 30  # RCCL's buffers between the ranks of a node, for eight of them


@dataclass(frozen=True, slots=True)
class Finding:
    level: Level
    topic: str
    sentence: str


@dataclass(frozen=True, slots=True)
class Place:
    """What is asked for: node `node_rank` of a launch around `host`."""

    node_rank: int
    host: str
    loopback_is_meant: bool = False


def judge(
    place: Place,
    network: Network | UserError,
    interfaces: Sequence[Interface],
    facts: HostFacts,
    environ: Mapping[str, str],
    busy: str | None,
) -> list[Finding]:
    """Judge this host. `network` is what was found, or why none was; `busy` says which port of node 0 is taken."""
    return [
        *_route(place, network, interfaces, environ),
        _hostname(facts),
        *_ports(place, network, busy),
        *_memory(facts),
        *(Finding(*found) for found in rdma_findings(facts, environ)),
        *_numa(facts),
    ]


def failures(findings: Sequence[Finding]) -> list[Finding]:
    return [one for one in findings if one.level == "fail"]


def _route(
    place: Place, network: Network | UserError, interfaces: Sequence[Interface], environ: Mapping[str, str]
) -> Iterator[Finding]:
    if isinstance(network, UserError):
        yield Finding("fail", "route", str(network))
        return
    interface = next(one for one in interfaces if one.name == network.interface)
    why = network.reasons["interface"]
    loopback = ipaddress.ip_address(network.address).is_loopback
    if loopback and not place.loopback_is_meant:
        yield Finding(
            "fail",
            "route",
            f"--dist-init-addr {place.host} is this host's own loopback ({network.interface}): no other node reaches"
            " it; give the address of node 0's interface that faces the others",
        )
    elif not loopback and place.node_rank > 0 and (own := own_interface(network.init_host, interfaces)) is not None:
        yield Finding(
            "fail",
            "route",
            f"--dist-init-addr {place.host}: this is node {place.node_rank}, and {own.name} here bears"
            f" {network.init_host} itself (as docker0 does on every host): give an address of node 0 that no other"
            " node has, or is this node 0?",
        )
    else:
        told = socket_environment(network.interface, environ)
        variables = " ".join(f"{name}={value}" for name, value in told.items())
        address = f"{network.interface}, {network.address}, MTU {network.mtu}"
        yield Finding("ok", "route", f"{address}: {why}; set for the ranks: {variables}")
    first = next((one for one in interface.addresses if ":" not in one), network.address)
    if not loopback and first != network.address and ":" not in network.address:
        yield Finding(
            "warn",
            "address",
            f"gloo and RCCL use the first address of {interface.name}, {first}, not {network.address}: the other node"
            f" must reach that one, too; if it does not, remove it from {interface.name}",
        )
    yield from _variables(environ, interface, why, interfaces)


def _variables(
    environ: Mapping[str, str], interface: Interface, why: str, interfaces: Sequence[Interface]
) -> Iterator[Finding]:
    for variable in (*EXACT, "NCCL_SOCKET_IFNAME"):
        wish = environ.get(variable)
        if not wish:
            continue
        try:
            if variable in EXACT:
                check_exact(variable, wish, interface, why, interfaces)
            else:
                check_nccl(wish, interface, why, interfaces)
        except UserError as error:
            yield Finding("fail", "variables", str(error))
        else:
            yield Finding("ok", "variables", f"{variable}={wish} chooses {interface.name}")


def _hostname(facts: HostFacts) -> Finding:
    address = facts.hostname_address
    if address is not None and not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        return Finding("ok", "hostname", f"{facts.hostname} is {address}")
    how = "does not resolve" if address is None else f"resolves to {address}"
    return Finding(
        "warn",
        "hostname",
        f"{facts.hostname} {how} here; harmless to this server, whose ranks are told their interface and never ask for"
        " the name, but gloo elsewhere listens on 127.0.0.1 then: give the name its real address in /etc/hosts",
    )


def _ports(place: Place, network: Network | UserError, busy: str | None) -> Iterator[Finding]:
    if busy is not None:
        yield Finding("fail", "ports", f"{busy} on node 0: end what listens there, or take another port (PORT0)")
    elif place.node_rank == 0 and isinstance(network, Network):
        yield Finding("ok", "ports", "PORT to PORT+3 are free")


def _memory(facts: HostFacts) -> Iterator[Finding]:
    if not facts.has_gpu:
        yield Finding("not looked at", "memlock, /dev/shm", "no GPU here (neither /dev/kfd nor /dev/nvidiactl)")
        return
    if facts.memlock_soft is None or facts.may_lock:
        yield Finding("ok", "memlock", "unlimited" if facts.memlock_soft is None else "CAP_IPC_LOCK lifts the limit")
    else:
        remedy = (
            "ulimit -l unlimited before the start (the hard limit allows it)"
            if facts.memlock_hard is None
            else "docker run --ulimit memlock=-1, or LimitMEMLOCK=infinity where the service starts"
        )
        yield Finding(
            "fail",
            "memlock",
            f"memlock is limited to {facts.memlock_soft >> 10} KiB: RDMA cannot pin memory; {remedy}",
        )
    free = facts.shm_free or 0
    if free < NEEDS_SHM:
        yield Finding(
            "fail",
            "/dev/shm",
            f"/dev/shm has {free >> 20} MiB free, RCCL wants {NEEDS_SHM >> 20}: docker run --ipc host, or --shm-size",
        )
    else:
        yield Finding("ok", "/dev/shm", f"{free >> 30} GiB free")


def _numa(facts: HostFacts) -> Iterator[Finding]:
    if facts.has_gpu and facts.numa_balancing:
        yield Finding(
            "warn",
            "numa_balancing",
            f"numa_balancing is {facts.numa_balancing}: the kernel moves pages that GPUs use, which costs speed;"
            " sysctl kernel.numa_balancing=0",
        )
    elif facts.has_gpu and facts.numa_balancing == 0:
        yield Finding("ok", "numa_balancing", "off")
