"""One server on two hosts, started on each by launch/two_node.sh; its client is on node 0's host."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import httpx

from tests.e2e.harness import ROOT
from tests.e2e.two_nodes import Node, TwoNodes
from tests.two_hosts.namespaces import Host, TwoHosts

SCRIPT = ROOT / "launch" / "two_node.sh"
HTTP_PORT = 9001
# After the production flags of the script, which are for GPUs of 192 GB.
SMALL = ["--device", "cpu", "--kv-cache-dtype", "auto", "--mem-fraction", "0.3", "--max-model-len", "4096"]
TP2_PP2 = ["--tp", "2", "--pp", "2", *SMALL]
PP2 = ["--tp", "1", "--pp", "2", *SMALL]


class _OnHost(httpx.HTTPTransport):
    """Connects from a namespace."""

    def __init__(self, host: Host) -> None:
        super().__init__(verify=False)
        self._host = host

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        with self._host.inside():
            return super().handle_request(request)


@dataclass
class TwoHostNodes(TwoNodes):
    """As `TwoNodes`, on `hosts`. `flags` come after those of two_node.sh."""

    hosts: TwoHosts = field(kw_only=True)

    def start_node(self, rank: int, address: str, *more: str, on: Host | None = None) -> Node:
        """Start two_node.sh on the host of `rank`, if not on another; `address` is RANK0_ADDR."""
        host = on or self.hosts.hosts[rank]
        words = [str(SCRIPT), address, str(rank), str(self.model), "--served-model-name", self.name]
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        return self.spawn(rank, host.command(*words, *self.flags, *more), {"PATH": path})

    def __enter__(self) -> Self:
        for host in self.hosts.hosts:
            self.start_node(host.rank, self.hosts.hosts[0].address)
        return self

    def client(self, timeout_s: float = 120) -> httpx.Client:
        """Also before the server is ready: its port is that of the script."""
        transport = _OnHost(self.hosts.hosts[0])
        return httpx.Client(base_url=f"http://127.0.0.1:{HTTP_PORT}", timeout=timeout_s, transport=transport)


@contextmanager
def serving(
    model: Path,
    work_dir: Path,
    flags: Sequence[str],
    hosts: TwoHosts,
    env: Mapping[int, Mapping[str, str]] | None = None,
) -> Iterator[TwoHostNodes]:
    """Two hosts that take requests."""
    with TwoHostNodes(model, work_dir, flags, env=env or {}, hosts=hosts) as nodes:
        nodes.await_ready()
        yield nodes
