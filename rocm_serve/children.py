"""One child process of a supervisor: its start, its log, its progress, its stack, its end. No torch."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rocm_serve.config.schema import Resolved
from rocm_serve.executor.heartbeat import Progress, heartbeat_file, read_progress
from rocm_serve.lifeline import STACKS_SIGNAL
from rocm_serve.platform.network import socket_environment

USER_ERROR: Final = 2
PEER_LOST: Final = 3  # a rank whose peer went away
SENT_AWAY: Final = 4  # a rank that the core told to leave, because of a failure
SUFFERED: Final = 3  # of `Child.guilt`
_TAIL_LINES = 12
_STACK_S = 1.5  # whoever does not write its stack within this time is stuck in the kernel
_SETTLED_S = 0.2

# What torch's own guards may do to ranks; this supervisor watches them instead. A value that the user has set is kept.
TORCH_GUARDS: Final[Mapping[str, str]] = {
    # Aborts a process whose NCCL watchdog thread seems stuck, which has killed servers that were only idle.
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # A collective that outlives --dist-timeout, or whose peer is gone, ends the process with an error.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    # On such an error torch would wait for dumps over a store that may be gone.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}


@dataclass(slots=True)
class Child:
    """A process with a log file. `rank` is None for the core."""

    name: str
    rank: int | None
    process: subprocess.Popen[bytes]
    log: Path
    beats: Path
    echoed: int = 0  # bytes of the log

    @classmethod
    def spawn(cls, name: str, rank: int | None, command: Sequence[str], run_dir: str, env: Mapping[str, str]) -> Child:
        """Start `python -m command...` with a log and a heartbeat file of its own."""
        log = Path(run_dir) / "logs" / f"{name}.log"
        beats = heartbeat_file(run_dir, name)
        beats.touch()
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-u", "-m", *command],
                stdin=subprocess.PIPE,  # never written to: it closes when this process ends, see lifeline
                stdout=out,
                stderr=subprocess.STDOUT,
                env=dict(env),
                start_new_session=True,  # Ctrl-C is for the supervisor, which drains
            )
        return cls(name, rank, process, log, beats)

    def new_lines(self) -> list[str]:
        """Return the whole lines that the log has gained."""
        with self.log.open("rb") as log:
            log.seek(self.echoed)
            whole, newline, _ = log.read().rpartition(b"\n")
        self.echoed += len(whole) + len(newline)
        return whole.decode(errors="replace").splitlines()

    @property
    def ended_badly(self) -> bool:
        return self.process.poll() not in (None, 0)

    @property
    def guilt(self) -> int:
        """Rank the ways to end, the likeliest first cause lowest; from SUFFERED on somebody else was first."""
        code = self.process.returncode
        if code < 0:
            return 0
        if code == USER_ERROR:
            return 1
        if self.rank is None:
            return SUFFERED + 1
        if code == SENT_AWAY:
            return SUFFERED + 2
        return SUFFERED if code == PEER_LOST else 2

    @property
    def progress(self) -> Progress:
        return read_progress(self.beats)

    @property
    def stopped(self) -> bool:
        """Whether a signal keeps it from running; always False where /proc is not there to tell."""
        try:
            status = Path(f"/proc/{self.process.pid}/stat").read_text()
        except OSError:
            return False
        return status.rpartition(")")[2].split()[0] in ("T", "t")

    def ask_for_stacks(self) -> int | None:
        """Have it write the stacks of its threads to its log; return where in the log they will begin.

        None: it has ended, or has no handler yet and the signal would only kill it.
        A process that a signal has stopped is continued for it: it is about to be ended.
        """
        if not self.progress.beats or self.process.poll() is not None:
            return None
        begin, stopped = self.log.stat().st_size, self.stopped
        self.process.send_signal(STACKS_SIGNAL)
        if stopped:
            self.process.send_signal(signal.SIGCONT)
        return begin

    def log_from(self, begin: int) -> str:
        with self.log.open("rb") as log:
            log.seek(begin)
            return log.read().decode(errors="replace")

    def fate(self) -> str:
        """Say what its supervisor finds when it ends everything."""
        code, where = self.process.poll(), self.progress.where()
        if code is None:
            return f"[{self.name}] ended by its supervisor in {where}"
        return f"[{self.name}] had ended with {_exit_words(code)} in {where}"

    def how_it_ended(self) -> str:
        """Say who ended, how, where it was, and the end of its log."""
        assert self.process.returncode is not None
        return describe(self.name, self.process.returncode, self.log, self.progress)


def stacks_of(children: Sequence[Child]) -> dict[str, str]:
    """Ask all for their stacks at once and return them by name; "" for one that does not answer."""
    asked = [(child, begin) for child in children if (begin := child.ask_for_stacks()) is not None]
    texts = {child.name: "" for child in children}
    found = {child.name: "" for child, _ in asked}
    since, end = time.monotonic(), time.monotonic() + _STACK_S
    while asked and time.monotonic() < end:
        now = {child.name: child.log_from(begin) for child, begin in asked}
        if now != found:
            found, since = now, time.monotonic()
        elif all(found.values()) and time.monotonic() - since > _SETTLED_S:
            break
        time.sleep(0.02)
    return texts | found


def child_environment(resolved: Resolved, env: Mapping[str, str], rank: int | None = None) -> dict[str, str]:
    """Add what children need: threads that share the cores, the interface, the names that launchers give a rank."""
    added = {name: value for name, value in TORCH_GUARDS.items() if name not in env}
    added["OMP_NUM_THREADS"] = str(resolved.torch_threads)
    if resolved.members == 1:
        added["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    else:
        added |= socket_environment(resolved.interface, env)
    if rank is not None:
        local = resolved.first_device + rank - resolved.local_ranks.start
        world = resolved.tp * resolved.pp
        added |= {"RANK": str(rank), "WORLD_SIZE": str(world)}
        added |= {"LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(world // resolved.nnodes)}
    return {**env, **added}


def describe(name: str, returncode: int, log: Path, progress: Progress | None = None) -> str:
    """Say who ended and how; a user's error is its one sentence, anything else comes with the end of the log."""
    lines = log.read_text(errors="replace").splitlines()
    if returncode == USER_ERROR and lines:
        return lines[-1].partition("error: ")[2] or lines[-1]
    where = f" in {progress.where()}" if progress is not None and progress.beats else ""
    tail = "".join(f"\n  {line}" for line in lines[-_TAIL_LINES:])
    return f"{name} ended with {_exit_words(returncode)}{where}; the end of {log}:{tail}"


def _exit_words(returncode: int) -> str:
    return f"exit code {returncode}" if returncode >= 0 else f"signal {signal.Signals(-returncode).name}"


def end_processes(processes: list[subprocess.Popen[bytes]], grace_s: float, term_s: float = 3.0) -> None:
    """Wait `grace_s` for all to end, then SIGTERM, `term_s`, SIGKILL; none is left when this returns."""
    wait_for(processes, grace_s)
    for process in processes:
        if process.poll() is None:
            process.terminate()
    wait_for(processes, term_s)
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.wait()
        if process.stdin is not None:
            process.stdin.close()


def wait_for(processes: list[subprocess.Popen[bytes]], seconds: float) -> None:
    """Wait until all have ended, or for `seconds`."""
    end = time.monotonic() + seconds
    while any(process.poll() is None for process in processes) and time.monotonic() < end:
        time.sleep(0.02)
