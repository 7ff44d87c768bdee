"""The part of the preflight about RDMA: cards, preset, which of them RCCL takes, and their address rows. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from rocm_serve.platform.host import HostFacts
from rocm_serve.platform.rdma import ACTIVE, FABRICS, RdmaPort, chosen_ports, preset_for

Found = tuple[Literal["ok", "warn", "fail", "not looked at"], str, str]


def rdma_findings(facts: HostFacts, environ: Mapping[str, str]) -> Iterator[Found]:
    """Judge the cards against the variables of RCCL. Yields level, topic and sentence."""
    if not facts.has_gpu:
        yield "not looked at", "RDMA", "no GPU here (neither /dev/kfd nor /dev/nvidiactl)"
        return
    if environ.get("NCCL_IB_DISABLE") == "1" or environ.get("NCCL_NET") == "Socket":
        yield from _disabled(environ)
        return
    if not facts.rdma_ports:
        yield (
            "fail",
            "RDMA",
            "no RDMA device in /sys/class/infiniband: load the driver of the cards, pass /dev/infiniband into the"
            " container, or accept TCP, about ten times slower, with NCCL_IB_DISABLE=1",
        )
        return
    if facts.rdma_files == 0:
        yield (
            "fail",
            "RDMA",
            f"{len(facts.rdma_ports)} RDMA ports, but no /dev/infiniband/uverbs*: docker run --device /dev/infiniband",
        )
    yield from _preset(facts.rdma_ports, environ)
    wish = environ.get("NCCL_IB_HCA", "")
    yield from _cards(facts.rdma_ports, wish)
    chosen = [one for one in chosen_ports(wish, facts.rdma_ports) if one.state == ACTIVE]
    yield from _rows(chosen, environ)
    if any(one.fabric is not None and one.fabric.preset == "ainic" for one in chosen):
        yield from _ainic(environ)


def _disabled(environ: Mapping[str, str]) -> Iterator[Found]:
    which = "NCCL_IB_DISABLE=1" if environ.get("NCCL_IB_DISABLE") == "1" else "NCCL_NET=Socket"
    if environ.get("NCCL_NET") == "IB":
        yield "fail", "RDMA", f"{which} and NCCL_NET=IB contradict each other: RCCL will not start; unset one"
        return
    yield (
        "warn",
        "RDMA",
        f"{which}: the nodes will talk over TCP, about ten times slower than RDMA; unset it if not meant",
    )
    yield "not looked at", "RDMA devices", f"{which} is set"


def _preset(ports: Sequence[RdmaPort], environ: Mapping[str, str]) -> Iterator[Found]:
    wish, right = environ.get("FABRIC", ""), preset_for(ports)
    here = sorted({one.fabric.card if one.fabric else f"{one.device} ({one.vendor})" for one in ports})
    known = [one.preset for one in FABRICS]
    if wish and any(one.fabric is not None and one.fabric.preset == wish for one in ports):
        yield "ok", "preset", f"FABRIC={wish} is that of {', '.join(here)}"
    elif wish in known:
        instead = f"set FABRIC={right}" if right else f"legal: {', '.join(known)}, or none and NCCL_IB_HCA by hand"
        yield "fail", "preset", f"FABRIC={wish} is not for the cards of this node, {', '.join(here)}: {instead}"
    elif not wish and right and "NCCL_IB_HCA" not in environ:
        yield "warn", "preset", f"no preset is loaded; FABRIC={right} is that of {', '.join(here)}"
    elif not wish and "NCCL_IB_HCA" not in environ:
        yield (
            "warn",
            "preset",
            f"cards of several makers or of none known ({', '.join(here)}): choose by FABRIC or NCCL_IB_HCA",
        )


def _cards(ports: Sequence[RdmaPort], wish: str) -> Iterator[Found]:
    """Judge the choice that NCCL_IB_HCA makes."""
    chosen = chosen_ports(wish, ports)
    variable = f"NCCL_IB_HCA={wish}" if wish else "NCCL_IB_HCA unset"
    names = ", ".join(one.name for one in ports)
    if not chosen:
        yield (
            "fail",
            "cards",
            f"{variable} chooses none of {names}: RCCL would fall to TCP; set NCCL_IB_HCA to their prefix",
        )
        return
    up = [one for one in chosen if one.state == ACTIVE]
    down = [one for one in chosen if one.state != ACTIVE]
    if not up:
        states = ", ".join(f"{one.name} {one.state or 'unknown'}" for one in down)
        yield "fail", "cards", f"{variable}: no port is ACTIVE ({states}): cable, switch port or driver"
        return
    if down:
        states = ", ".join(f"{one.name} {one.state or 'unknown'}" for one in down)
        level: Literal["warn", "fail"] = "fail" if wish.startswith("=") else "warn"
        keep = ",".join(one.name for one in up)
        yield (
            level,
            "cards",
            f"{variable} names ports that are not ACTIVE ({states}); if that is meant, NCCL_IB_HCA=={keep}",
        )
    rates = {one.rate for one in up}
    if len(rates) > 1:
        told = ", ".join(f"{one.name} {one.rate}" for one in up)
        yield "warn", "cards", f"{variable} mixes rates ({told}): leave out the slow ones, NCCL_IB_HCA==NAME,NAME"
    if not down and len(rates) == 1:
        yield "ok", "cards", f"{variable}: {len(up)} ports ACTIVE, {', '.join(one.name for one in up)}, {up[0].rate}"


def _rows(ports: Sequence[RdmaPort], environ: Mapping[str, str]) -> Iterator[Found]:
    """Judge the address row of each RoCE port; InfiniBand needs none."""
    wish = environ.get("NCCL_IB_GID_INDEX", "")
    roce = [one for one in ports if one.ethernet]
    if not roce:
        return
    if wish and not wish.lstrip("-").isdigit():
        yield "fail", "GID row", f"NCCL_IB_GID_INDEX={wish!r} is no number; right here: {_right_rows(roce)}"
        return
    if not wish or int(wish) < 0:
        yield "ok", "GID row", f"NCCL_IB_GID_INDEX unset: RCCL chooses; RoCE v2 with IPv4 here: {_right_rows(roce)}"
        return
    wrong = []
    for one in roce:
        gid = one.gid(int(wish))
        if gid is None or not gid.routable:
            wrong.append(f"{one.name} has {gid if gid is not None else f'no address in row {wish}'}")
    if wrong:
        yield (
            "fail",
            "GID row",
            f"NCCL_IB_GID_INDEX={wish} must be a RoCE v2 row with an IPv4-mapped address: {'; '.join(wrong)};"
            f" right here: {_right_rows(roce)}",
        )
    else:
        yield "ok", "GID row", f"NCCL_IB_GID_INDEX={wish} is RoCE v2 with IPv4 on {len(roce)} ports"


def _right_rows(ports: Sequence[RdmaPort]) -> str:
    """Say which row would do: one number when it is the same on all ports."""
    rows = {one.name: [gid.row for gid in one.gids if gid.routable] for one in ports}
    common = set.intersection(*(set(found) for found in rows.values()))
    if common:
        return f"NCCL_IB_GID_INDEX={min(common)}"
    told = ", ".join(f"{name} {' or '.join(map(str, found)) or 'none'}" for name, found in rows.items())
    return f"{told} (a port without one has no IPv4 address on its network interface)"


def _ainic(environ: Mapping[str, str]) -> Iterator[Found]:
    drivers = environ.get("IBV_DRIVERS") or environ.get("RDMAV_DRIVERS") or ""
    if "ionic" not in drivers:
        yield "warn", "ionic", "IBV_DRIVERS=ionic is not set: libibverbs may not load the card's provider"
    if environ.get("RCCL_AINIC_ROCE") != "1" and "NCCL_NET_PLUGIN" not in environ:
        yield (
            "warn",
            "ionic",
            "RCCL_AINIC_ROCE=1 is not set: RCCL before ROCm 7.2.1 needs NCCL_NET_PLUGIN instead, later ones this",
        )
