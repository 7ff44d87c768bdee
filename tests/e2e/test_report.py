"""`rocm-serve report` about a server that runs, and about one that was killed."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.e2e.harness import ROOT, Server, ServerFailed

SECRET = "sesame-Zq7-open-up"


def report(run_dir: Path, out: Path) -> dict[str, str]:
    command = [sys.executable, "-m", "rocm_serve", "report", "--run-dir", str(run_dir), "--out", str(out)]
    subprocess.run(command, check=True, cwd=ROOT, timeout=60)
    with tarfile.open(out) as tar:
        return {m.name.split("/", 1)[1]: tar.extractfile(m).read().decode() for m in tar.getmembers()}  # type: ignore[union-attr]


@pytest.mark.slow
@pytest.mark.multirank
def test_a_live_and_a_killed_server_can_be_reported_and_a_secret_of_theirs_is_not(
    checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    monkeypatch.setenv("ROCM_SERVE_SERVED_MODEL_NAME", "unused")
    server = Server(checkpoints["text-fp8"], tmp_path / "run", ("--device", "cpu", "--tp", "2"), name=f"m-{SECRET}")
    server.start()
    (run_dir,) = map(Path, re.findall(r"logs of workers and core: (\S+)", server.log))
    live = report(run_dir, tmp_path / "live.tar.gz")
    assert {"started.json", "resolved.json", "plan.txt", "logs/node.log", "logs/core.log"} <= set(live)
    assert {"logs/rank-0.log", "logs/rank-1.log"} <= set(live)
    assert "ready" in live["logs/node.log"] or "effective num_pages" in live["logs/node.log"]
    worker = next(p for p in server.processes() if "rocm_serve.executor.worker" in " ".join(p.cmdline()))
    worker.kill()
    with pytest.raises(ServerFailed):
        server.stop()
    dead = report(run_dir, tmp_path / "dead.tar.gz")
    assert f"report --run-dir {run_dir}" in server.log
    assert "SIGKILL" in dead["logs/node.log"]
    for files in (live, dead):
        for name, text in files.items():
            assert SECRET not in text, name
