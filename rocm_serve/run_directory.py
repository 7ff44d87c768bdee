"""A folder of a run for sockets and logs, and what becomes of those that are left.

A run that ended well removes its own. One that failed keeps it: its logs are wanted. One that was killed could not
choose. What is left of either is removed by the first start that finds it a day old and held by nobody.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from rocm_serve.diagnostics.collect import RUN_DIR_PREFIX
from rocm_serve.engine.link import LONGEST_NAME, endpoint
from rocm_serve.errors import UserError

KEPT_S: Final = 24 * 3600.0
LOCK: Final = "held"  # the kernel frees it however its holder ends; a process id may be another's, or of a container


class RunDirectory:
    """A folder for sockets and logs; removed at the end unless `keep` is set."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.keep = False


@contextlib.contextmanager
def run_directory() -> Iterator[RunDirectory]:
    """Make this run's folder, and remove it unless somebody has to read its logs. Errors: UserError."""
    try:
        directory = RunDirectory(Path(tempfile.mkdtemp(prefix=RUN_DIR_PREFIX)))
    except OSError as error:
        raise UserError(f"no folder for sockets and logs: {error.strerror}; TMPDIR may name one") from None
    node_log = None
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(_lock(directory.path))
            endpoint(str(directory.path), LONGEST_NAME)
            (directory.path / "logs").mkdir()
            node_log = logging.FileHandler(directory.path / "logs" / "node.log")
            node_log.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
            logging.getLogger().addHandler(node_log)
            remove_old(directory.path)
            yield directory
        finally:
            if node_log is not None:
                logging.getLogger().removeHandler(node_log)
                node_log.close()
            if directory.keep:
                where = directory.path
                sys.stderr.write(
                    f"logs are kept in {where} for a day; rocm-serve report --run-dir {where} packs them\n"
                )
                sys.stderr.flush()
            else:
                shutil.rmtree(directory.path, ignore_errors=True)


def remove_old(mine: Path) -> None:
    """Remove the folders beside `mine`, of the same user, that nobody holds and nothing was written to for a day."""
    now = mine.stat().st_mtime
    for path in mine.parent.glob(f"{RUN_DIR_PREFIX}*"):
        with contextlib.suppress(OSError):  # somebody else is removing it, or it is not ours to touch
            mine_too = path.lstat().st_uid == os.getuid() and not path.is_symlink()
            if path == mine or not mine_too or now - _last_write(path) < KEPT_S:
                continue
            with _lock(path):
                shutil.rmtree(path)


def _last_write(path: Path) -> float:
    return max(one.stat().st_mtime for one in (path, path / LOCK, *path.glob("logs/*")))


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold a run directory. Errors: OSError when another process does."""
    with (path / LOCK).open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
