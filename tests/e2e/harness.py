"""Start `rocm-serve serve` as a user would, talk to it over HTTP, and end it: a clean end is part of every test.

The ready line and /ready say when it may be used; whatever goes wrong carries the server's own output.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

READY_S = 180.0
DRAIN_S = 60.0
ROOT = Path(__file__).resolve().parents[2]
LIVE: list[Server] = []  # servers of this test process, for reports of failing tests


class ServerFailed(AssertionError):
    """The server did not start, or did not end, as it must."""


@dataclass
class Server:
    """One `rocm-serve serve` and everything it started.

    `flags` are given as on the command line. Use it as a context manager: leaving it sends SIGTERM and asserts exit
    code 0 and no process left behind.
    """

    model: Path
    work_dir: Path
    flags: Sequence[str] = ()
    name: str = "tiny"
    program: Sequence[str] = ("rocm_serve", "serve")  # what `python -m` runs
    base_url: str = ""
    ready_line: str = ""
    _process: subprocess.Popen[bytes] | None = None
    _family: list[psutil.Process] = field(default_factory=list)

    @property
    def log_path(self) -> Path:
        return self.work_dir / "server.log"

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def over(self) -> bool:
        """It has been started and ended."""
        return self not in LIVE and self._process is not None

    def start(self, ready_s: float = READY_S) -> Self:
        """Spawn, and return once /ready answers 200. Errors: ServerFailed with the server's output."""
        self.work_dir.mkdir(parents=True, exist_ok=True)
        command = [
            *(sys.executable, "-m", *self.program, "--model", str(self.model)),
            *("--served-model-name", self.name, "--host", "127.0.0.1", "--port", "0", *self.flags),
        ]
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]  # packages may come by that way only
        env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
        with self.log_path.open("wb") as out:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=env, cwd=self.work_dir
            )
        LIVE.append(self)
        deadline = time.monotonic() + ready_s
        while not self._is_ready():
            if self._process.poll() is not None:
                self._give_up(f"the server ended with code {self._process.returncode} before it was ready")
            if time.monotonic() > deadline:
                self._give_up(f"the server was not ready within {ready_s:.0f} s")
            time.sleep(0.1)
        return self

    def _is_ready(self) -> bool:
        if not self.base_url:
            found = re.search(r"^.*(http://127\.0\.0\.1:\d+).*$", self.log, re.MULTILINE)
            if not found:
                return False
            self.ready_line, self.base_url = found.group(0), found.group(1)
        try:
            with self.client(timeout_s=5) as client:
                return client.get("/ready").status_code == 200
        except httpx.TransportError:
            return False

    def client(self, timeout_s: float = 600.0) -> httpx.Client:
        # there is no TLS, and reading the certificates that `verify` wants takes longer than many an answer
        return httpx.Client(base_url=self.base_url, timeout=timeout_s, verify=False)

    def post(self, path: str, body: Mapping[str, object]) -> dict[str, Any]:
        """POST JSON, expect 200, return the answer."""
        with self.client() as client:
            response = client.post(path, json=body)
        assert response.status_code == 200, f"{path}: {response.status_code} {response.text}"
        answer: dict[str, Any] = response.json()
        return answer

    def complete(self, **body: object) -> dict[str, Any]:
        return self.post("/v1/completions", {"model": self.name} | body)

    def metrics(self) -> dict[str, float]:
        """Return every sample of /metrics; labels are part of the key, as in `name{kind="mixed"}`."""
        with self.client() as client:
            text = client.get("/metrics").text
        samples: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = ",".join(f'{key}="{value}"' for key, value in sorted(sample.labels.items()))
                samples[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
        return samples

    def processes(self) -> list[psutil.Process]:
        """Return the server and all its descendants that live now; remembers them for `stop`."""
        assert self._process is not None
        try:
            parent = psutil.Process(self._process.pid)
            found = [parent, *parent.children(recursive=True)]
        except psutil.NoSuchProcess:
            found = []
        known = {p.pid for p in self._family}
        self._family += [p for p in found if p.pid not in known]
        return found

    @contextmanager
    def held(self) -> Iterator[None]:
        """Stop rank 0, or the one process there is, while the block runs: what is sent meanwhile is there at once."""
        server, *others = self.processes()
        held = next((one for one in others if one.cmdline()[-2:] == ["--rank", "0"]), server)
        held.suspend()
        try:
            yield
        finally:
            held.resume()

    def await_clients(self, count: int, within_s: float = 60.0) -> None:
        """Wait until this process has so many connections to the server. Errors: AssertionError."""
        port = int(self.base_url.rpartition(":")[2])
        deadline = time.monotonic() + within_s

        def open_here() -> int:
            mine = psutil.Process().net_connections("tcp")
            return sum(one.status == psutil.CONN_ESTABLISHED and one.raddr.port == port for one in mine)

        while (seen := open_here()) < count:
            assert time.monotonic() < deadline, f"{seen} of {count} clients within {within_s:.0f} s"
            time.sleep(0.01)

    def stop(self, drain_s: float = DRAIN_S) -> None:
        """Send SIGTERM. Errors: ServerFailed unless it ends with code 0 and all its processes with it."""
        assert self._process is not None
        self.processes()
        if self._process.poll() is not None:
            self._give_up(f"the server had ended by itself with code {self._process.returncode}")
        self._process.send_signal(signal.SIGTERM)
        try:
            code = self._process.wait(drain_s)
        except subprocess.TimeoutExpired:
            self._give_up(f"the server did not end within {drain_s:.0f} s of SIGTERM")
        _, left = psutil.wait_procs(self._family, timeout=5)
        if code != 0 or left:
            self._give_up(f"SIGTERM: exit code {code}, processes left: {left}")
        LIVE.remove(self)

    def ends_itself(self, within_s: float) -> int:
        """Wait until it has ended without being asked to, and return its exit code. Errors: ServerFailed."""
        assert self._process is not None
        self.processes()
        try:
            code = self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            self._give_up(f"the server did not end by itself within {within_s:.0f} s")
        _, left = psutil.wait_procs(self._family, timeout=5)
        if left:
            self._give_up(f"it ended with code {code}, processes left: {left}")
        LIVE.remove(self)
        return code

    def _give_up(self, sentence: str) -> None:
        """End what is left and raise."""
        self.processes()
        for process in self._family:
            if process.is_running():
                process.kill()
        assert self._process is not None
        self._process.wait(10)
        if self in LIVE:
            LIVE.remove(self)
        raise ServerFailed(f"{sentence}\n--- output of the server ---\n{self.log[-8000:]}")

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self.over:
            return
        try:
            self.stop()
        except ServerFailed:
            if error is None:
                raise


@dataclass(frozen=True)
class Scored:
    """One choice, by token ids: entry i of each list belongs to token i; the first prompt token has no log-prob."""

    tokens: list[int]
    logprobs: list[float | None]
    top: list[dict[int, float] | None]
    finish_reason: str

    @classmethod
    def read(cls, choice: Mapping[str, Any]) -> Scored:
        """Read a choice that was asked for with `return_tokens_as_token_ids` and `logprobs`."""
        lists = choice["logprobs"]
        tops = [top and {token_id(name): value for name, value in top.items()} for top in lists["top_logprobs"]]
        tokens = [token_id(name) for name in lists["tokens"]]
        return cls(tokens, lists["token_logprobs"], tops, choice["finish_reason"])


def token_id(name: str) -> int:
    prefix, _, number = name.partition(":")
    assert prefix == "token_id", f"{name!r} is not an id"
    return int(number)


def score(server: Server, prompts: Sequence[Sequence[int]], **body: object) -> list[Scored]:
    """Complete prompts of ids greedily with echo and log-probs; one answer per prompt, in their order."""
    asked = {
        "prompt": [list(prompt) for prompt in prompts],
        "temperature": 0,
        "echo": True,
        "logprobs": 5,
        "ignore_eos": True,
        "return_tokens_as_token_ids": True,
    }
    choices = sorted(server.complete(**(asked | body))["choices"], key=lambda choice: choice["index"])
    assert [choice["index"] for choice in choices] == list(range(len(prompts)))
    return [Scored.read(choice) for choice in choices]
