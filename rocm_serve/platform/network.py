"""The one address policy: every channel uses the interface that the route between the members takes. Pure.

Facts are asked for in platform/probe.py; here they are judged. Names of interfaces are exact, as gloo wants them.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rocm_serve.errors import UserError

# Whose variables take exact names of interfaces.
EXACT = {"GLOO_SOCKET_IFNAME": "gloo", "MORI_SOCKET_IFNAME": "MORI", "TP_SOCKET_IFNAME": "tensorpipe"}


@dataclass(frozen=True, slots=True)
class Interface:
    name: str
    addresses: tuple[str, ...]
    up: bool
    mtu: int = 0  # 0: not known
    inside: bool = False  # a bridge none of whose ports leaves this host, such as docker0


@dataclass(frozen=True, slots=True)
class Network:
    """What one member uses: `address` is its own, on `interface`; `init_host` is member 0's, as a number."""

    init_host: str
    address: str
    interface: str
    mtu: int = 0
    reasons: dict[str, str] = field(default_factory=dict)


def check_resolved(host: str, address: str) -> None:
    """Refuse a name that this host has for itself only.

    Errors: UserError. An address of 127.* that was typed as a number, or "localhost", is somebody's wish.
    """
    typed = host == "localhost" or _is_number(host)
    if not typed and ipaddress.ip_address(address).is_loopback:
        raise UserError(
            f"--dist-init-addr {host}: this host resolves the name to {address}, which no other host can reach;"
            " give the address of the interface that faces the other nodes"
        )


def own_interface(address: str, interfaces: Sequence[Interface]) -> Interface | None:
    """Find the interface that bears `address`; all of 127/8 is the loopback's."""
    for interface in interfaces:
        if address in interface.addresses:
            return interface
    if ipaddress.ip_address(address).is_loopback:
        for interface in interfaces:
            if any(ipaddress.ip_address(one).is_loopback for one in interface.addresses):
                return interface
    return None


def network_of(
    member: int,
    host: str,
    init_host: str,
    source: str | None,
    interfaces: Sequence[Interface],
    environ: Mapping[str, str],
) -> Network:
    """Choose address and interface of a member.

    `source` is the address from which this host would reach `init_host`, None when it has no route. What `environ`
    has for gloo and NCCL must agree with the choice.
    Errors: UserError saying what to set.
    """
    have = "; ".join(f"{one.name} {' '.join(one.addresses)}" for one in interfaces if one.addresses)
    if member == 0:
        address, why = init_host, "bears the address of --dist-init-addr"
        if own_interface(init_host, interfaces) is None:
            raise UserError(
                f"--dist-init-addr {host}: node 0 must own {init_host}, and this host has {have};"
                " is this node 0, or does it need another --node-rank?"
            )
    else:
        if source is None:
            raise UserError(f"--dist-init-addr {host}: this host has no route to {init_host}; it has {have}")
        address, why = source, f"the route to {init_host} takes it"
    interface = own_interface(address, interfaces)
    if interface is None:
        raise UserError(f"no interface of this host bears {address}, from which it reaches {init_host}; it has {have}")
    if not interface.up:
        raise UserError(
            f"interface {interface.name}, which bears {address}, is down: ip link set {interface.name} up,"
            f" or give an address of another; this host has {have}"
        )
    if interface.inside:
        raise UserError(
            f"--dist-init-addr {host}: {interface.name} {why}, but no port of that bridge leaves this host: other hosts"
            f" cannot reach {address}; give the address of the interface that faces the other nodes, here {have}"
        )
    check_variables(environ, interface, why, interfaces)
    return Network(init_host, address, interface.name, interface.mtu, {"interface": why})


def check_variables(
    environ: Mapping[str, str], interface: Interface, why: str, interfaces: Sequence[Interface]
) -> None:
    """Hold every variable that names an interface against the one that was found.

    Errors: UserError naming the value that works.
    """
    for variable in EXACT:
        if environ.get(variable):
            check_exact(variable, environ[variable], interface, why, interfaces)
    if environ.get("NCCL_SOCKET_IFNAME"):
        check_nccl(environ["NCCL_SOCKET_IFNAME"], interface, why, interfaces)


def check_exact(variable: str, wish: str, interface: Interface, why: str, interfaces: Sequence[Interface]) -> None:
    """Hold a variable that takes exact names, gloo's a list of them, against the interface that was found.

    Errors: UserError naming the value that works: gloo itself hangs for a minute or says "Unable to find address".
    """
    known = [one.name for one in interfaces]
    names = wish.split(",") if variable == "GLOO_SOCKET_IFNAME" else [wish]
    remedy = f"set {variable}={interface.name} or leave it unset"
    for name in names:
        if name not in known:
            syntax = f" ({EXACT[variable]} takes exact names, not NCCL's = ^ or prefixes)"
            is_nccls = name[:1] in ("=", "^") or any(one.startswith(name) for one in known)
            raise UserError(
                f"{variable}={wish}: no interface {name!r}{syntax if is_nccls else ''};"
                f" here are {', '.join(known)}; {remedy}"
            )
    if interface.name not in names:
        raise UserError(f"{variable}={wish}, but {interface.name} {why}; {remedy}")


def check_nccl(wish: str, interface: Interface, why: str, interfaces: Sequence[Interface]) -> None:
    """Hold NCCL_SOCKET_IFNAME (RCCL's too) against the interface that was found.

    It is a list of prefixes; of exact names after `=`; of prefixes that are left out after `^`, or names after `^=`.
    Errors: UserError naming the value that works: on the wrong one the ranks wait for each other.
    """
    exclude, rest = wish.startswith("^"), wish.removeprefix("^")
    exact, rest = rest.startswith("="), rest.removeprefix("=")
    parts = [part for part in rest.split(",") if part]

    def listed(name: str) -> bool:
        return any(name == part if exact else name.startswith(part) for part in parts)

    if listed(interface.name) == exclude:
        chosen = ", ".join(one.name for one in interfaces if listed(one.name) != exclude) or "no interface"
        raise UserError(
            f"NCCL_SOCKET_IFNAME={wish} chooses {chosen} here, but {interface.name} {why};"
            f" set NCCL_SOCKET_IFNAME=={interface.name} or leave it unset"
        )


def socket_environment(interface: str, given: Mapping[str, str]) -> dict[str, str]:
    """Name the interface to every library that opens sockets of its own, each in its own syntax.

    What the user has set for NCCL and MORI is kept; gloo's variable has been checked and may have been a list.
    """
    wanted = {"NCCL_SOCKET_IFNAME": f"={interface}", "MORI_SOCKET_IFNAME": interface, "TP_SOCKET_IFNAME": interface}
    kept = {name: value for name, value in wanted.items() if not given.get(name)}
    return {"GLOO_SOCKET_IFNAME": interface, **kept}


def _is_number(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
