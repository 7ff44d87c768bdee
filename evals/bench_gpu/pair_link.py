"""What crosses between two ranks, and how fast: the all-reduce of layers, the edge between stages, a plain copy.

    python -m evals.bench_gpu.pair_link --rank R --addresses A B --device cuda|cpu --sizes N ... --out FILE

Each of two processes runs it; rank 0 writes what it measured. Groups, communicators and edges are the product's.
"""

from __future__ import annotations

import argparse
import faulthandler
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from evals.bench_gpu.pair_records import LinkRecord
from rocm_serve.executor.edges import Receiver, Sender
from rocm_serve.parallel.groups import leave_groups, make_groups
from rocm_serve.parallel.mesh import Mesh

_ROUNDS, _CALLS = 9, 20  # calls of a round
_CPU_ROUNDS, _CPU_CALLS = 3, 4  # where the program itself is tried
_WIDTH = 2048  # columns of a row on an edge
_COPIED = 1 << 28  # bytes
_JOIN_S = 60.0
_STUCK_S = 40.0

Call = Callable[[], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--addresses", nargs=2, required=True, help="two free places to meet at")
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--sizes", type=int, nargs="+", required=True, help="bytes of bf16 rows")
    parser.add_argument("--out", type=Path, required=True)
    a = parser.parse_args()
    faulthandler.dump_traceback_later(_STUCK_S)  # so that whoever ends it can say where it hung
    device = torch.device(a.device, a.rank) if a.device == "cuda" else torch.device("cpu")
    found: list[LinkRecord] = []
    if device.type == "cuda":
        torch.cuda.set_device(device)
        if a.rank == 0:
            found.append(copied(device))
    with torch.inference_mode():
        found += all_reduces(a.rank, a.addresses[0], device, a.sizes)
        found += sends(a.rank, a.addresses[1], device, a.sizes)
    if a.rank == 0:
        a.out.write_bytes(msgspec.json.encode(found))


def copied(device: torch.device) -> LinkRecord:
    """Copy from this GPU to the other, by this process alone."""
    source = torch.randint(0, 255, (_COPIED,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source, device=torch.device("cuda", 1))

    def copy() -> None:
        target.copy_(source, non_blocking=True)

    record = _record("copy", _COPIED, _rounds([copy] * 4, device), 4, "calls")
    torch.cuda.synchronize()
    return record


def all_reduces(rank: int, address: str, device: torch.device, sizes: Sequence[int]) -> list[LinkRecord]:
    """Time the sum over ranks that layers call; on GPUs as replays of a graph of many."""
    groups = make_groups(Mesh(2, 1).coord(rank), gpu=device.type == "cuda", init_addr=address, timeout_s=_JOIN_S)
    count, found = _calls(device), []
    for size in sizes:
        x = torch.randn(size // 2, device=device).to(torch.bfloat16)
        calls: list[Call] = [lambda x=x: groups.tp.all_reduce(x)] * count  # type: ignore[misc]
        play, how = ([_recorded(calls)], "graph") if device.type == "cuda" else (calls, "calls")
        dist.barrier()
        found.append(_record("all_reduce", size, _rounds(play, device), count, how))
    _leave(device)
    return found


def sends(rank: int, address: str, device: torch.device, sizes: Sequence[int]) -> list[LinkRecord]:
    """Time a message there and back over the edge between two stages, by its sender and receiver; half of that."""
    groups = make_groups(Mesh(1, 2).coord(rank), gpu=device.type == "cuda", init_addr=address, timeout_s=_JOIN_S)
    edge = groups.to_next or groups.from_previous
    assert edge is not None
    sender, count, found = Sender(edge, slots=3), _calls(device), []
    receiver = Receiver(edge, hidden_size=_WIDTH, dtype=torch.bfloat16, device=device)
    for rows in sorted({max(1, size // (2 * _WIDTH)) for size in sizes}):
        calls = [_round_trip(sender, receiver, rank, rows, device)] * count
        dist.barrier()
        found.append(_record("send", rows * _WIDTH * 2, _rounds(calls, device), 2 * count, "there and back"))
    sender.flush()
    _leave(device)
    return found


def _calls(device: torch.device) -> int:
    return _CPU_CALLS if device.type == "cpu" else _CALLS


def _leave(device: torch.device) -> None:
    """Leave when both are done: a message of the other may still be on its way."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    leave_groups()


def _round_trip(sender: Sender, receiver: Receiver, rank: int, rows: int, device: torch.device) -> Call:
    x_TH = torch.randn(rows, _WIDTH, device=device).to(torch.bfloat16)

    def first() -> None:
        sender.send(x_TH)
        receiver.post(rows).wait()

    def second() -> None:
        sender.send(receiver.post(rows).wait())

    return first if rank == 0 else second


def _recorded(calls: Sequence[Call]) -> Call:
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # as executor/graphs.py, for NCCL's threads
        for call in calls:
            call()
    return lambda: graph.replay()


def _rounds(calls: Sequence[Call], device: torch.device) -> list[float]:
    """Return the seconds of all calls, round by round, after one that does not count."""
    times = []
    for _ in range(1 + (_CPU_ROUNDS if device.type == "cpu" else _ROUNDS)):
        if device.type == "cpu":
            began = time.perf_counter()
            for call in calls:
                call()
            times.append(time.perf_counter() - began)
            continue
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for call in calls:
            call()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) / 1e3)
    return times[1:]


def _record(what: str, nbytes: int, rounds: Sequence[float], calls: int, how: str) -> LinkRecord:
    low, median, high = (1e6 * one / calls for one in statistics.quantiles(rounds, n=4))
    return LinkRecord(what, nbytes, median, low, high, how)


if __name__ == "__main__":
    main()
