"""What a server holds on to: gauges of /metrics, and descriptors, threads and memory of each of its processes."""

from __future__ import annotations

import time
from dataclasses import dataclass

from tests.e2e.harness import Server

GAUGES = ("running", "waiting", "open", "pages_used", "slots_used", "server_tasks")


@dataclass(frozen=True)
class Held:
    """One look. `descriptors` and `rss` are by process id, the server's own first; rss in bytes."""

    gauges: dict[str, float]
    descriptors: dict[int, int]
    rss: dict[int, int]

    @classmethod
    def look(cls, server: Server) -> Held:
        metrics = server.metrics()
        processes = server.processes()
        return cls(
            {name: metrics[f"rocm_serve_{name}"] for name in GAUGES},
            {process.pid: process.num_fds() for process in processes},
            {process.pid: process.memory_info().rss for process in processes},
        )

    def idle(self) -> bool:
        return not any(value for name, value in self.gauges.items() if name != "server_tasks")

    def same_as(self, other: Held) -> bool:
        return self.gauges == other.gauges and self.descriptors == other.descriptors


def at_rest(server: Server, within_s: float = 30.0) -> Held:
    """Return what an idle server holds, once two looks in a row agree."""
    deadline = time.monotonic() + within_s
    before = Held.look(server)
    while True:
        time.sleep(0.2)
        now = Held.look(server)
        if now.idle() and now.same_as(before):
            return now
        assert time.monotonic() < deadline, f"not at rest after {within_s:.0f} s: {now}"
        before = now


def back_to(server: Server, baseline: Held, within_s: float = 30.0) -> Held:
    """Wait until nothing more is held than at `baseline`; returns the last look. A failure names both."""
    deadline = time.monotonic() + within_s
    while not (now := Held.look(server)).same_as(baseline):
        assert time.monotonic() < deadline, f"left behind after {within_s:.0f} s: {now}, at first {baseline}"
        time.sleep(0.1)
    return now


def restored_s(server: Server, aborted: float = 0, within_s: float = 30.0) -> float:
    """Wait until nothing runs, waits or holds a page or slot; return how long that took.

    `aborted`: so many were to be counted by then. What is cut before the engine has read it is not in its gauges yet.
    """
    began = time.monotonic()
    with server.client() as client:
        while True:
            text = client.get("/metrics").text
            values = dict(line.split(" ")[:2] for line in text.splitlines() if not line.startswith("#"))
            left = {name: values[f"rocm_serve_{name}"] for name in GAUGES[:-1]}
            took = time.monotonic() - began
            counted = float(values["rocm_serve_aborted_requests_total"])
            if not any(map(float, left.values())) and counted >= aborted:
                return took
            assert took < within_s, f"left behind after {took:.1f} s: {left}, {counted:.0f} of {aborted:.0f} aborted"
            time.sleep(0.005)
