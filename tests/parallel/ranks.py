"""Run a function on several ranks, each a fresh process that meets the others over gloo."""

from __future__ import annotations

import multiprocessing
import os
import queue
import traceback
from collections.abc import Callable
from multiprocessing.queues import Queue
from typing import Any

from rocm_serve.parallel.mesh import Coord, Mesh
from rocm_serve.platform.probe import free_port

Body = Callable[[Coord, Any], Any]


def run_processes(
    mesh: Mesh, body: Body, timeout_s: float = 120, *, gpu: bool = False, host: bool = False
) -> list[Any]:
    """Call `body(coord, groups)` on every rank of `mesh`; return the results in rank order.

    `gpu`: groups of GPUs; a body sets its device. `host`: have `Groups.host` made.
    """
    context = multiprocessing.get_context("spawn")
    results: Queue[tuple[int, bool, Any]] = context.Queue()
    address = f"127.0.0.1:{free_port()}"
    processes = [
        context.Process(target=_child, args=(mesh, rank, address, body, results, gpu, host))
        for rank in range(mesh.world)
    ]
    for process in processes:
        process.start()
    try:
        got: dict[int, Any] = {}
        while len(got) < mesh.world:
            try:
                rank, fine, value = results.get(timeout=timeout_s)
            except queue.Empty:
                raise AssertionError(f"only ranks {sorted(got)} answered within {timeout_s} s") from None
            assert fine, f"rank {rank} failed:\n{value}"
            got[rank] = value
        return [got[rank] for rank in range(mesh.world)]
    finally:
        for process in processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
                process.join()


def _child(
    mesh: Mesh, rank: int, address: str, body: Body, results: Queue[tuple[int, bool, Any]], gpu: bool, host: bool
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch

    from rocm_serve.parallel.groups import leave_groups, make_groups

    torch.set_num_threads(1)
    try:
        coord = mesh.coord(rank)
        groups = make_groups(coord, gpu=gpu, init_addr=address, timeout_s=60, host=host, tokens=True)
        results.put((rank, True, body(coord, groups)))
        leave_groups()
    except BaseException:
        results.put((rank, False, traceback.format_exc()))
