"""Which ranks this process starts: from the flags, or from what torchrun or srun have set for it. Pure.

A *member* is one `rocm-serve serve` process. Usually a member is a host (`--nnodes N --node-rank R`) and starts all
ranks of that host. A launcher that starts one process per rank makes each of them a member with one rank. Member 0
also runs the engine core and the HTTP server.

Honoured, in this order:

* `--node-rank`, when given;
* torchrun: LOCAL_RANK, RANK, WORLD_SIZE (and LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT): a member per rank;
* srun with a task per rank (SLURM_STEP_NUM_TASKS = tp x pp): SLURM_PROCID, SLURM_LOCALID: a member per rank;
* srun with a task per host: SLURM_NODEID is the node rank, when --nnodes is above 1.

RANK and WORLD_SIZE without LOCAL_RANK are not torchrun's (some job controllers count hosts in them): left alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rocm_serve.config.schema import ServeConfig
from rocm_serve.errors import UserError

MAX_PORT = 65535
PORTS = 4  # from that of --dist-init-addr: store, plans, news, control


@dataclass(frozen=True, slots=True)
class Membership:
    """Where this process stands. `first_device` is the index of its first GPU on the host."""

    nnodes: int = 1
    node_rank: int = 0
    members: int = 1
    member: int = 0
    first_device: int = 0
    init_addr: str | None = None  # HOST:PORT as given, or None
    reasons: dict[str, str] = field(default_factory=dict)


def membership(config: ServeConfig, environ: Mapping[str, str]) -> Membership:
    """Decide what this process starts.

    Errors: UserError naming flag or variable and what is legal.
    """
    if config.nnodes < 1:
        raise UserError(f"--nnodes {config.nnodes}: legal: 1 and more")
    world = config.tp * config.pp
    if config.node_rank is None:
        torchrun = "LOCAL_RANK" in environ and "RANK" in environ and "WORLD_SIZE" in environ
        if torchrun and (world > 1 or environ["WORLD_SIZE"] != "1"):
            return _of_torchrun(config, environ)
        per_rank = world > 1 and environ.get("SLURM_STEP_NUM_TASKS") == str(world) != str(config.nnodes)
        if per_rank and "SLURM_PROCID" in environ and "SLURM_LOCALID" in environ:
            return _of_srun_per_rank(config, environ)
    reasons: dict[str, str] = {}
    node_rank = config.node_rank
    if node_rank is None:
        node_rank = 0
        if config.nnodes > 1 and "SLURM_NODEID" in environ:
            node_rank = _number(environ, "SLURM_NODEID")
            reasons["node_rank"] = "SLURM_NODEID"
        elif config.nnodes > 1:
            raise UserError(f"--nnodes {config.nnodes} needs --node-rank; legal: 0..{config.nnodes - 1}")
    if not 0 <= node_rank < config.nnodes:
        legal = "0" if config.nnodes == 1 else f"0..{config.nnodes - 1}"
        raise UserError(f"--node-rank {node_rank}: legal with --nnodes {config.nnodes}: {legal}")
    _check_nodes(config)
    init_addr = config.dist_init_addr
    if config.nnodes > 1:
        init_addr = _init_addr(config, environ, reasons)
    return Membership(
        nnodes=config.nnodes,
        node_rank=node_rank,
        members=config.nnodes,
        member=node_rank,
        init_addr=init_addr,
        reasons=reasons,
    )


def split_address(address: str) -> tuple[str, int]:
    """Take HOST:PORT or [HOST]:PORT apart. Errors: UserError."""
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isdigit() and 0 < int(port) <= MAX_PORT):
        raise UserError(f"--dist-init-addr {address!r}: legal: HOST:PORT, port 1..{MAX_PORT}")
    return host.strip("[]"), int(port)


def split_init_addr(address: str) -> tuple[str, int]:
    """Take the HOST:PORT apart at which members meet. Errors: UserError, also when there is no room for all ports."""
    host, port = split_address(address)
    if port > MAX_PORT - (PORTS - 1):
        raise UserError(
            f"--dist-init-addr {address}: ports up to PORT+{PORTS - 1} are used; legal: up to {MAX_PORT - 3}"
        )
    return host, port


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _check_nodes(config: ServeConfig) -> None:
    world = config.tp * config.pp
    if config.nnodes == 1:
        return
    if world % config.nnodes:
        legal = [n for n in range(1, world + 1) if world % n == 0]
        raise UserError(f"--nnodes {config.nnodes}: {world} ranks do not divide by it; legal: {_words(legal)}")
    if config.pp % config.nnodes:
        legal = [n for n in range(1, config.pp + 1) if config.pp % n == 0]
        raise UserError(
            f"--tp {config.tp} with {world // config.nnodes} ranks a node: a stage may not span nodes;"
            f" legal --nnodes with --pp {config.pp}: {_words(legal)}"
        )


def _of_torchrun(config: ServeConfig, environ: Mapping[str, str]) -> Membership:
    return _per_rank(
        config,
        environ,
        launcher="torchrun",
        rank_from="RANK",
        size_from="WORLD_SIZE",
        local_from="LOCAL_RANK",
        local_size_from="LOCAL_WORLD_SIZE",
    )


def _of_srun_per_rank(config: ServeConfig, environ: Mapping[str, str]) -> Membership:
    return _per_rank(
        config,
        environ,
        launcher="srun",
        rank_from="SLURM_PROCID",
        size_from="SLURM_STEP_NUM_TASKS",
        local_from="SLURM_LOCALID",
        local_size_from="",
    )


def _per_rank(
    config: ServeConfig,
    environ: Mapping[str, str],
    *,
    launcher: str,
    rank_from: str,
    size_from: str,
    local_from: str,
    local_size_from: str,
) -> Membership:
    world = config.tp * config.pp
    rank, size, local = (_number(environ, name) for name in (rank_from, size_from, local_from))
    if size != world:
        raise UserError(
            f"{launcher} started {size} processes ({size_from}), and by --tp {config.tp} x --pp {config.pp} the number"
            f" of ranks is {world}; legal: as many processes as ranks, or one per host with --nnodes and --node-rank"
        )
    if not 0 <= rank < world:
        raise UserError(f"{rank_from}={rank}: legal: 0..{world - 1}")
    per_node = _number(environ, local_size_from) if local_size_from in environ else max(1, world // config.nnodes)
    if per_node < 1 or world % per_node:
        raise UserError(f"{local_size_from}={per_node}: {world} ranks do not divide by it")
    reasons = {"member": f"{launcher}: one process per rank ({rank_from}, {size_from}, {local_from})"}
    if config.nnodes not in (1, world // per_node):
        raise UserError(f"--nnodes {config.nnodes}: {launcher} runs {per_node} of {world} ranks on each host")
    return Membership(
        nnodes=world // per_node,
        node_rank=rank // per_node,
        members=world,
        member=rank,
        first_device=local,
        init_addr=_init_addr(config, environ, reasons),
        reasons=reasons,
    )


def _init_addr(config: ServeConfig, environ: Mapping[str, str], reasons: dict[str, str]) -> str:
    address = config.dist_init_addr
    if address is None and "MASTER_ADDR" in environ and "MASTER_PORT" in environ:
        # torchrun's own store listens on MASTER_PORT itself.
        address = join_address(environ["MASTER_ADDR"].strip("[]"), _number(environ, "MASTER_PORT") + 1)
        reasons["dist_init_addr"] = "MASTER_ADDR and MASTER_PORT + 1"
    if address is None:
        raise UserError(
            "several hosts need --dist-init-addr HOST:PORT: an address of node 0 that the others reach;"
            f" ports PORT to PORT+{PORTS - 1} are used there"
        )
    split_init_addr(address)
    return address


def _number(environ: Mapping[str, str], name: str) -> int:
    try:
        return int(environ[name])
    except ValueError:
        raise UserError(f"{name}={environ[name]!r} is no number") from None


def _words(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
