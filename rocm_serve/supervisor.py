"""Starts the processes of this host, watches them, and ends them: engine core and workers, one log file each.

Imports no torch. Children are fresh interpreters; each dies with this process (see `lifeline`).
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rocm_serve.config.schema import Resolved

_TICK_S = 0.1
_SIBLINGS_S = 0.5  # neighbours of a dead process fail within this time; the cause is looked for among all
_TAIL_LINES = 12
_USER_ERROR = 2


@dataclass(slots=True)
class _Child:
    name: str
    process: subprocess.Popen[bytes]
    log: Path
    echoed: int = 0  # bytes of the log

    def new_lines(self) -> list[str]:
        with self.log.open("rb") as log:
            log.seek(self.echoed)
            whole, newline, _ = log.read().rpartition(b"\n")
        self.echoed += len(whole) + len(newline)
        return whole.decode(errors="replace").splitlines()


class Supervisor:
    """The children of one `rocm-serve serve`.

    `env` is the environment that children start from. `on_failure` is called once, from the watching thread, with
    the sentence that says who ended and why; by then the other children are being ended. `echo` gets start-up lines.
    """

    def __init__(
        self,
        resolved: Resolved,
        env: Mapping[str, str],
        *,
        on_failure: Callable[[str], None],
        echo: Callable[[str], None],
    ) -> None:
        self._resolved = resolved
        self._run_dir = Path(resolved.run_dir)
        self._env = child_environment(resolved, env)
        self._on_failure = on_failure
        self._echo = echo
        self._children: list[_Child] = []
        self._stopping = threading.Event()
        self._quiet = threading.Event()
        self._watcher: threading.Thread | None = None
        self.failure: str | None = None
        self.exit_code = 0

    def start(self) -> None:
        """Start core and workers and begin to watch them."""
        (self._run_dir / "logs").mkdir(parents=True, exist_ok=True)
        resolved_file = self._run_dir / "resolved.json"
        resolved_file.write_bytes(msgspec.json.encode(self._resolved))
        common = ("--resolved", str(resolved_file))
        self._spawn("core", "rocm_serve.engine.main", *common)
        per_node = self._resolved.tp * self._resolved.pp // self._resolved.nnodes
        first = self._resolved.node_rank * per_node
        for rank in range(first, first + per_node):
            self._spawn(f"rank-{rank}", "rocm_serve.executor.worker", *common, "--rank", str(rank))
        self._watcher = threading.Thread(target=self._watch, name="supervisor", daemon=True)
        self._watcher.start()

    @property
    def pids(self) -> dict[str, int]:
        """Process ids by name: "core", "rank-0" and so on."""
        return {child.name: child.process.pid for child in self._children}

    @property
    def exit_codes(self) -> dict[str, int | None]:
        """Exit codes by name; None while a child runs, negative for a signal."""
        return {child.name: child.process.poll() for child in self._children}

    def quiet(self) -> None:
        """Stop echoing: the server is ready, what follows is in the logs."""
        self._quiet.set()

    def stop(self, grace_s: float = 10.0) -> None:
        """Let drained children leave on their own, then end the rest; remove sockets. Idempotent.

        A child that failed while nobody watched any more still sets `failure` and `exit_code`.
        """
        self._stopping.set()
        if self._watcher is not None:
            self._watcher.join()
        _wait([child.process for child in self._children], grace_s)
        if self.failure is None and self._ended_badly():
            self._name_cause()
        end_processes([child.process for child in self._children], grace_s=0.0)
        self._remove_sockets()

    def _spawn(self, name: str, module: str, *args: str) -> None:
        log = self._run_dir / "logs" / f"{name}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-u", "-m", module, *args],
                stdin=subprocess.PIPE,  # never written to: it closes when this process ends, see lifeline
                stdout=out,
                stderr=subprocess.STDOUT,
                env=self._env,
                start_new_session=True,  # Ctrl-C is for the supervisor, which drains
            )
        self._children.append(_Child(name, process, log))

    def _watch(self) -> None:
        while not self._stopping.wait(_TICK_S):
            self._echo_new_lines()
            if self._ended_badly():
                time.sleep(_SIBLINGS_S)
                self._echo_new_lines()
                self._on_failure(self._name_cause())
                end_processes([child.process for child in self._children], grace_s=0.0)
                self._remove_sockets()
                return

    def _echo_new_lines(self) -> None:
        for child in self._children:
            for line in child.new_lines():
                if not self._quiet.is_set():
                    self._echo(f"[{child.name}] {line}")

    def _ended_badly(self) -> list[_Child]:
        return [child for child in self._children if child.process.poll() not in (None, 0)]

    def _name_cause(self) -> str:
        # Killed from outside comes first: whoever talked to it fails with an error of its own a moment later.
        ended = self._ended_badly()
        cause = min(ended, key=lambda child: (child.process.returncode > 0, child.name == "core"))
        self.failure = describe(cause.name, cause.process.returncode, cause.log)
        self.exit_code = _USER_ERROR if cause.process.returncode == _USER_ERROR else 1
        return self.failure

    def _remove_sockets(self) -> None:
        for path in self._run_dir.glob("*"):
            if path.is_socket():
                path.unlink(missing_ok=True)


def child_environment(resolved: Resolved, env: Mapping[str, str]) -> dict[str, str]:
    """Add what children need: threads that share the cores, and gloo on the loopback when there is one host."""
    added = {"OMP_NUM_THREADS": str(resolved.torch_threads)}
    if resolved.nnodes == 1:
        added["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    return {**env, **added}


def describe(name: str, returncode: int, log: Path) -> str:
    """Say who ended and how; a user's error is its one sentence, anything else comes with the end of the log."""
    lines = log.read_text(errors="replace").splitlines()
    if returncode == _USER_ERROR and lines:
        return lines[-1].partition("error: ")[2] or lines[-1]
    how = f"exit code {returncode}" if returncode >= 0 else f"signal {signal.Signals(-returncode).name}"
    tail = "".join(f"\n  {line}" for line in lines[-_TAIL_LINES:])
    return f"{name} ended with {how}; the end of {log}:{tail}"


def end_processes(processes: list[subprocess.Popen[bytes]], grace_s: float, term_s: float = 3.0) -> None:
    """Wait `grace_s` for all to end, then SIGTERM, `term_s`, SIGKILL; none is left when this returns."""
    _wait(processes, grace_s)
    for process in processes:
        if process.poll() is None:
            process.terminate()
    _wait(processes, term_s)
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait()
        if process.stdin is not None:
            process.stdin.close()


def _wait(processes: list[subprocess.Popen[bytes]], seconds: float) -> None:
    end = time.monotonic() + seconds
    while any(process.poll() is None for process in processes) and time.monotonic() < end:
        time.sleep(0.02)
