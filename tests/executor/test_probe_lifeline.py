"""A probe does not outlive the rank that started it, whatever its provider does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

PARENT = """
import sys
from pathlib import Path
from tests.executor.test_probe_node import prober
prober(Path(sys.argv[1]), call_s=120.0).probe([("rms_norm", "hangs")])
"""


def children_of(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(word) for word in path.read_text().split()] if path.exists() else []


def test_a_hanging_probe_ends_with_the_rank_that_was_killed(tmp_path: Path) -> None:
    root = str(Path(__file__).parents[2])
    env = dict(os.environ) | {"PYTHONPATH": root}
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)], env=env, cwd=root)
    try:
        end = time.monotonic() + 120
        while not (found := children_of(parent.pid)) or not _hangs(tmp_path):
            assert time.monotonic() < end and parent.poll() is None, "the probe did not start"
            time.sleep(0.1)
        (child,) = found
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        end = time.monotonic() + 10
        while Path(f"/proc/{child}").exists() and _state(child) != "Z":
            assert time.monotonic() < end, "the probe is still there"
            time.sleep(0.05)
    finally:
        parent.kill()
        parent.wait()


def _hangs(run_dir: Path) -> bool:
    """Its request is there; torch is loaded some seconds later, and then it sleeps for an hour."""
    return bool(list(run_dir.glob("probe-*/request.json")))


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "Z"
