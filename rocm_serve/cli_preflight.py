"""The command `preflight`: is this host ready to be one of several, said in a second and before anything is loaded."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from rocm_serve.config import load
from rocm_serve.config.launcher import split_init_addr
from rocm_serve.diagnostics.preflight import Finding, Place, failures, judge
from rocm_serve.doors import busy_port, tell
from rocm_serve.errors import UserError
from rocm_serve.platform import probe
from rocm_serve.platform.network import Network
from rocm_serve.platform.rdma import preset_for

NOT_READY = 2


def preflight(
    dist_init_addr: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="As for serve.")] = None,
    node_rank: Annotated[int, typer.Option(help="As for serve.")] = 0,
    nnodes: Annotated[int, typer.Option(help="As for serve.")] = 2,
    root: Annotated[Path, typer.Option(metavar="DIR", help="Where dev, proc and sys are.")] = Path("/"),
    tell_for: Annotated[float, typer.Option(metavar="SECONDS", help="To tell other nodes of a failure.")] = 30.0,
    as_json: Annotated[bool, typer.Option("--json", help="Findings as JSON.")] = False,
    which_preset: Annotated[
        bool, typer.Option("--which-preset", help="Only print the fabric preset for the cards of this host.")
    ] = False,
) -> None:
    """Check route, interface, ports, limits and RDMA cards of this host before a launch over several.

    Exit code 0: ready, perhaps with warnings; 2: not, and the other nodes are told why.
    """
    if which_preset:
        typer.echo(preset_for(probe.host_facts(root).rdma_ports) or "")
        return
    if dist_init_addr is None:
        raise UserError("preflight needs --dist-init-addr HOST:PORT: an address of node 0 that the others reach")
    if not 0 <= node_rank < nnodes:
        raise UserError(f"--node-rank {node_rank}: legal with --nnodes {nnodes}: 0..{nnodes - 1}")
    if not 0 <= tell_for < math.inf:
        raise UserError(f"--tell-for {tell_for:g}: legal: 0 or more seconds")
    host, port = split_init_addr(dist_init_addr)
    environ = load.environment()
    network: Network | UserError
    try:
        network = probe.find_network(node_rank, host, {})
    except UserError as error:
        network = error
    busy = busy_port(network.init_host, port) if node_rank == 0 and isinstance(network, Network) else None
    place = Place(node_rank, host, loopback_is_meant=bool(environ.get("ALLOW_LOOPBACK")))
    findings = judge(place, network, probe.interfaces(), probe.host_facts(root), environ, busy)
    failed = failures(findings)
    if as_json:
        typer.echo(msgspec.json.encode({"ready": not failed, "findings": findings}).decode())
    else:
        _show(findings, node_rank, environ.get("FABRIC", ""))
    if failed and any(one.topic == "route" for one in failed):
        raise typer.Exit(NOT_READY)  # there is no way by which anybody could be told
    if failed:
        why = "; ".join(one.sentence for one in failed)
        tell("node", node_rank, nnodes, dist_init_addr, f"its preflight failed: {why}", _echo, tell_for)
        raise typer.Exit(NOT_READY)


def _show(findings: list[Finding], node_rank: int, fabric: str) -> None:
    console = Console(soft_wrap=True, highlight=False, markup=False)
    console.print(f"preflight of node {node_rank}" + (f", preset {fabric}" if fabric else ""))
    for one in findings:
        console.print(f"  {one.level:<13} {one.topic}: {one.sentence}")
    count = len(failures(findings))
    console.print("  ready" if not count else f"  not ready: {count} to mend")


def _echo(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
