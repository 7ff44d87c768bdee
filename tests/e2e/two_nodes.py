"""Two `rocm-serve serve` processes as two nodes: both on the loopback here, or each in a place of its own.

Their ranks are found among their children, where they are from the files that their supervisors read.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import psutil

from rocm_serve.executor.heartbeat import Progress, heartbeat_file, read_progress
from tests.e2e.harness import ROOT

READY_S = 180.0
PORTS = 4


def free_ports(host: str = "127.0.0.2") -> int:
    """Find a port that is free together with the next three, on the loopback's second address if not on another."""
    while True:
        with ExitStack() as held, socket.socket() as first:
            first.bind((host, 0))
            port = int(first.getsockname()[1])
            try:
                for other in range(port + 1, port + PORTS):
                    held.enter_context(socket.socket()).bind((host, other))
            except OSError:
                continue
            return port


@dataclass
class Node:
    """One supervisor, its output and its children."""

    rank: int
    log_path: Path
    process: subprocess.Popen[bytes]
    family: list[psutil.Process] = field(default_factory=list)

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    @property
    def run_dir(self) -> str:
        found = re.search(r"logs of workers and core: (\S+)", self.log)
        return found[1] if found else ""

    def look(self) -> list[psutil.Process]:
        """Return its living children, and remember them."""
        try:
            children = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        known = {one.pid for one in self.family}
        self.family += [one for one in children if one.pid not in known]
        return children

    def child(self, name: str) -> psutil.Process | None:
        """Find "core" or "rank-R"."""
        words = "rocm_serve.engine.main" if name == "core" else f"--rank {name.removeprefix('rank-')}"
        for one in self.look():
            try:
                if f"{' '.join(one.cmdline())} ".find(f"{words} ") >= 0:
                    return one
            except psutil.Error:
                continue
        return None


@dataclass
class TwoNodes:
    """Start both with `with`; leaving it ends whatever is left, without a word about how."""

    model: Path
    work_dir: Path
    flags: Sequence[str] = ()
    name: str = "tiny"
    env: Mapping[int, Mapping[str, str]] = field(default_factory=dict)  # more of it, by node
    nodes: list[Node] = field(default_factory=list)

    def start_node(self, rank: int, address: str, *more: str) -> Node:
        where = ["--nnodes", "2", "--node-rank", str(rank), "--dist-init-addr", address]
        return self.start_by([sys.executable, "-m"], *where, *more, rank=rank)

    def start_by(self, launcher: Sequence[str], *more: str, rank: int = 0) -> Node:
        """Start `launcher... rocm_serve serve ...`; its output is one log."""
        command = [
            *(*launcher, "rocm_serve", "serve", "--model", str(self.model)),
            *("--served-model-name", self.name, "--host", "127.0.0.1", "--port", "0", *self.flags, *more),
        ]
        return self.spawn(rank, command)

    def spawn(self, rank: int, command: Sequence[str], more_env: Mapping[str, str] | None = None) -> Node:
        """Start a node by a command of its own."""
        self.work_dir.mkdir(parents=True, exist_ok=True)
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]  # packages may come by that way only
        env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
        env |= {**(more_env or {}), **self.env.get(rank, {})}
        log = self.work_dir / f"node-{rank}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=env, cwd=self.work_dir
            )
        self.nodes.append(Node(rank, log, process))
        return self.nodes[-1]

    def __enter__(self) -> Self:
        address = f"127.0.0.2:{free_ports()}"
        for rank in (0, 1):
            self.start_node(rank, address)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for node in self.nodes:
            node.look()
        for node in self.nodes:
            for one in (*node.family, node.process):
                if isinstance(one, subprocess.Popen):
                    one.kill()
                    one.wait()
                elif one.is_running():
                    one.kill()
        for node in self.nodes:
            if error is not None:
                error.add_note(f"--- output of node {node.rank}\n{node.log[-6000:]}")
            elif node.run_dir:  # kept after a failure
                shutil.rmtree(node.run_dir, ignore_errors=True)

    @property
    def base_url(self) -> str:
        found = re.search(r"ready: (http://\S+) serves", self.nodes[0].log)
        return found[1] if found else ""

    def await_ready(self) -> None:
        """Return once requests are taken. Errors: AssertionError, also when a node ends before that."""

        def over() -> bool:
            return self.base_url != "" or any(node.process.poll() is not None for node in self.nodes)

        self.until(over, READY_S, "the server was not ready")
        assert self.base_url != "", "a node ended before the server was ready"
        for node in self.nodes:
            node.look()

    def until(self, done: Callable[[], bool], within_s: float, otherwise: str, *, every_s: float = 0.05) -> float:
        """Wait for `done`, asked every so often; return how long it took. Errors: AssertionError with `otherwise`."""
        began = time.monotonic()
        while not done():
            assert time.monotonic() - began < within_s, f"{otherwise} within {within_s} s"
            time.sleep(every_s)
        return time.monotonic() - began

    def client(self, timeout_s: float = 120) -> httpx.Client:
        # there is no TLS, and reading the certificates that `verify` wants takes longer than many an answer
        return httpx.Client(base_url=self.base_url, timeout=timeout_s, verify=False)

    def progress(self, name: str) -> Progress | None:
        """Look at a process as its supervisor does; None before it is there."""
        for node in self.nodes:
            path = heartbeat_file(node.run_dir, name) if node.run_dir else None
            if path is not None and path.exists():
                return read_progress(path)
        return None

    def process(self, name: str) -> psutil.Process:
        """Find "node-N", "core" or "rank-R"."""
        if name.startswith("node-"):
            return psutil.Process(self.nodes[int(name.removeprefix("node-"))].process.pid)
        found = [one for node in self.nodes if (one := node.child(name)) is not None]
        assert found, f"no process {name}"
        return found[0]

    def signal(self, name: str, number: signal.Signals) -> None:
        for node in self.nodes:
            node.look()
        self.process(name).send_signal(number)

    def health(self) -> int:
        """Status of /health; 0 when nobody answers."""
        try:
            with self.client(5) as client:
                return client.get("/health").status_code
        except httpx.TransportError:
            return 0

    def end(self, within_s: float) -> tuple[int, int]:
        """Wait for both supervisors and every child of theirs; return the exit codes."""
        self.until(
            lambda: all(node.process.poll() is not None for node in self.nodes), within_s, "the nodes did not end"
        )
        for node in self.nodes:
            left = [one for one in node.family if alive(one)]
            self.until(lambda: not any(map(alive, left)), 5, f"left over: {left}")  # noqa: B023
        first, second = (node.process.returncode for node in self.nodes)
        return first, second


@contextmanager
def serving(
    model: Path, work_dir: Path, flags: Sequence[str], env: Mapping[int, Mapping[str, str]] | None = None
) -> Iterator[TwoNodes]:
    """Two nodes that take requests."""
    with TwoNodes(model, work_dir, flags, env=env or {}) as nodes:
        nodes.await_ready()
        yield nodes


def alive(one: psutil.Process) -> bool:
    try:
        return bool(one.is_running() and one.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def completion(client: httpx.Client, prompt: object, **body: object) -> dict[str, Any]:
    """POST a greedy completion and return its answer, whatever its status."""
    asked = {"model": "tiny", "prompt": prompt, "temperature": 0, "ignore_eos": True} | body
    answer: dict[str, Any] = client.post("/v1/completions", json=asked).json()
    return answer
