"""The processes of one side: the server's own workers under this process, without server and engine core. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import msgspec

from rocm_serve.children import Child, child_environment, end_processes
from rocm_serve.config.schema import Resolved
from rocm_serve.diagnostics.parity.drive import Driver
from rocm_serve.errors import UserError
from rocm_serve.executor.api import ExecutorFailed
from rocm_serve.executor.multiproc import MultiprocExecutor

WORKER = "rocm_serve.executor.taps"


@contextmanager
def started(resolved: Resolved, env: Mapping[str, str], name: str, *, worker: str = WORKER) -> Iterator[Driver]:
    """Start a worker for every rank, and end them all. `worker`: the module that a rank runs.

    Errors: UserError when a side cannot be run to the end, with the sentence of the rank that knows why.
    """
    run_dir = Path(resolved.run_dir)
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    file = run_dir / "resolved.json"
    file.write_bytes(msgspec.json.encode(resolved))
    executor = MultiprocExecutor(resolved)
    children: list[Child] = []
    failed = True
    try:
        for rank in resolved.local_ranks:
            command = (worker, "--resolved", str(file), "--rank", str(rank))
            environment = child_environment(resolved, env, rank)
            children.append(Child.spawn(f"rank-{rank}", rank, command, resolved.run_dir, environment))
        yield Driver(executor, executor.start())
        failed = False
    except ExecutorFailed as error:
        raise UserError(f"side {name} failed: {error}; logs: {run_dir / 'logs'}") from None
    finally:
        executor.shutdown(failed=failed)
        end_processes([child.process for child in children], grace_s=0.0 if failed else 10.0)
