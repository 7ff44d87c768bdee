"""Worker processes for tests, started by hand as a supervisor would."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rocm_serve.children import child_environment, end_processes
from rocm_serve.config.schema import Resolved
from rocm_serve.executor.multiproc import MultiprocExecutor
from tests.executor.generate import Session


@dataclass
class World:
    session: Session
    workers: list[subprocess.Popen[bytes]]
    run_dir: Path

    def log(self, rank: int) -> str:
        return (self.run_dir / f"rank-{rank}.log").read_text()


@contextmanager
def world(
    wish: Resolved,
    run_dir: Path,
    *,
    worker: str = "rocm_serve.executor.worker",
    variables: dict[str, str] | None = None,
) -> Iterator[World]:
    """Start tp x pp workers and a core side in this process; end all of them afterwards. `worker`: their module."""
    config = run_dir / "resolved.json"
    config.write_bytes(msgspec.json.encode(wish))
    workers = []
    for rank in range(wish.tp * wish.pp):
        command = [sys.executable, "-m", worker, "--resolved", str(config), "--rank", str(rank)]
        with (run_dir / f"rank-{rank}.log").open("wb") as log:
            env = child_environment(wish, dict(os.environ) | (variables or {}))
            workers.append(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, env=env)
            )
    executor = MultiprocExecutor(wish)
    try:
        yield World(Session(executor), workers, run_dir)
    finally:
        executor.shutdown()
        end_processes(workers, grace_s=10)
