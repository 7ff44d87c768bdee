"""The only maker of process groups: who talks to whom, over gloo (CPU) or RCCL/NCCL (GPU)."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from rocm_serve.errors import UserError
from rocm_serve.parallel.board import Board, NotesOfOneProcess, StoreBoard
from rocm_serve.parallel.comm import Comm, GlooComm, NcclComm, SoloComm
from rocm_serve.parallel.mesh import Coord


@dataclass(frozen=True, slots=True)
class EdgeGroup:
    """The two ends of one pipeline edge and a communicator of their own."""

    group: dist.ProcessGroup
    peer: int  # global rank at the other end


@dataclass(frozen=True, slots=True)
class Groups:
    """What one rank can talk to."""

    tp: Comm
    host: Comm | None  # the same ranks over gloo, where asked for: for what libraries tell each other when they start
    board: Board
    from_previous: EdgeGroup | None  # None on the first stage
    to_next: EdgeGroup | None  # None on the last stage
    from_last: EdgeGroup | None = None  # of tokens, where asked for; on the first of several stages
    to_first: EdgeGroup | None = None  # its other end, on the last stage


def make_groups(
    coord: Coord, *, gpu: bool, init_addr: str, timeout_s: float, host: bool = False, tokens: bool = False
) -> Groups:
    """Join the world at `init_addr` (host:port of rank 0's TCPStore) and make this rank's groups.

    `host`: make `Groups.host`, too; `tokens`: the edge from the last of several stages to the first. Every rank makes
    every group in the same order, as torch.distributed asks, and returns when all have: one that refuses to go on then
    breaks no connection that another is making. One rank needs no world at all.
    Errors: torch.distributed's own when a peer does not appear within `timeout_s`.
    """
    mesh = coord.mesh
    if mesh.world == 1:
        solo = SoloComm()
        return Groups(tp=solo, host=solo if host else None, board=NotesOfOneProcess(), from_previous=None, to_next=None)
    timeout = timedelta(seconds=timeout_s)
    store = _store(init_addr, mesh.world, is_master=coord.rank == 0, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=coord.rank, world_size=mesh.world, timeout=timeout)
    backend = "nccl" if gpu else "gloo"

    def make(ranks: tuple[int, ...], backend: str = backend) -> dist.ProcessGroup | None:
        group = dist.new_group(list(ranks), backend=backend, timeout=timeout)
        return group if coord.rank in ranks else None

    def of_stages(backend: str) -> dist.ProcessGroup:
        mine = [make(mesh.tp_group(stage), backend) for stage in range(mesh.pp)][coord.stage]
        assert mine is not None
        return mine

    tp: Comm = SoloComm()
    if mesh.tp > 1:
        tp = NcclComm(of_stages(backend)) if gpu else GlooComm(of_stages(backend))
    beside: Comm | None = None
    if host:
        beside = GlooComm(of_stages("gloo")) if gpu and mesh.tp > 1 else tp

    def edge(source_stage: int, target_stage: int) -> tuple[EdgeGroup | None, EdgeGroup | None]:
        """Return this rank's end if it is the source's, and if it is the target's."""
        ends: tuple[EdgeGroup | None, EdgeGroup | None] = None, None
        for source, target in zip(mesh.tp_group(source_stage), mesh.tp_group(target_stage), strict=True):
            group = make((source, target))
            if group is not None:
                out = coord.rank == source
                ends = (EdgeGroup(group, target), None) if out else (None, EdgeGroup(group, source))
        return ends

    from_previous = to_next = to_first = from_last = None
    for stage in range(mesh.pp - 1):
        out, into = edge(stage, stage + 1)
        to_next, from_previous = to_next or out, from_previous or into
    if tokens and mesh.pp > 1:
        to_first, from_last = edge(mesh.pp - 1, 0)
    dist.barrier()
    board = StoreBoard(store, coord.rank, mesh.world)
    return Groups(tp, beside, board, from_previous, to_next, from_last, to_first)


def _store(init_addr: str, world: int, *, is_master: bool, timeout: timedelta) -> dist.Store:
    """Open or join the store. Left to itself torch listens on every interface; here only on the given address.

    Errors: UserError when rank 0 cannot listen there.
    """
    host, _, digits = init_addr.rpartition(":")
    host, port = host.strip("[]"), int(digits)
    if not is_master:
        return dist.TCPStore(host, port, world, is_master=False, timeout=timeout)
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((host, port))
            listening.listen()
        except OSError as error:
            raise UserError(f"--dist-init-addr {init_addr}: rank 0 cannot listen there: {error.strerror}") from None
        fd = os.dup(listening.fileno())  # the store closes it
    return dist.TCPStore(host, port, world, is_master=True, timeout=timeout, master_listen_fd=fd)


def leave_groups() -> None:
    """Leave the world, if this process is in one."""
    if dist.is_initialized():
        dist.destroy_process_group()
