"""`rocm-serve preflight` on this machine, and on one with GPUs that is a tree of files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.two_nodes import free_ports
from tests.platform.fabric import make_device, make_gpu_host

ROOT = Path(__file__).parents[1]
VARIABLES = ("NCCL", "RCCL", "IBV", "FABRIC", "GLOO", "MORI", "TP_", "ALLOW_LOOPBACK")


def run(*args: object, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(VARIABLES)}
    return subprocess.run(
        [sys.executable, "-m", "rocm_serve", "preflight", *map(str, args)],
        env=clean | {"PYTHONPATH": str(ROOT)} | env,
        capture_output=True,
        text=True,
        check=False,
    )


def here(rank: int = 0) -> list[str]:
    return ["--dist-init-addr", f"127.0.0.2:{free_ports()}", "--node-rank", str(rank), "--tell-for", "0.5"]


def test_a_host_that_is_ready_says_so_with_every_finding() -> None:
    done = run(*here(), ALLOW_LOOPBACK="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[0] == "preflight of node 0" and done.stdout.splitlines()[-1] == "  ready"
    assert "GLOO_SOCKET_IFNAME=lo" in done.stdout


def test_a_host_that_is_not_ready_ends_with_2_and_tries_to_tell_the_others() -> None:
    done = run(*here(1), ALLOW_LOOPBACK="1", GLOO_SOCKET_IFNAME="ib9")
    assert done.returncode == 2 and "fail" in done.stdout and done.stdout.splitlines()[-1] == "  not ready: 1 to mend"
    assert "telling node 0 by 127.0.0.2:" in done.stderr and "Traceback" not in done.stderr


def test_without_a_route_nobody_can_be_told() -> None:
    done = run(*here(1))
    assert done.returncode == 2 and "is this host's own loopback" in done.stdout and done.stderr == ""


def test_findings_as_json_on_a_host_with_gpus_and_a_wrong_row(tmp_path: Path) -> None:
    make_gpu_host(tmp_path)
    make_device(tmp_path, "mlx5_0")
    done = run(*here(), "--root", tmp_path, "--json", ALLOW_LOOPBACK="1", FABRIC="cx7", NCCL_IB_GID_INDEX="0")
    said = json.loads(done.stdout)
    bad = [one for one in said["findings"] if one["level"] == "fail"]
    assert done.returncode == 2 and said["ready"] is False
    assert any(one["topic"] == "GID row" and "NCCL_IB_GID_INDEX=3" in one["sentence"] for one in bad)


def test_the_preset_of_the_cards_is_printed_alone(tmp_path: Path) -> None:
    make_device(tmp_path, "bnxt_re0", vendor="0x14e4")
    assert run("--which-preset", "--root", tmp_path).stdout == "thor2\n"
    assert run("--which-preset", "--root", tmp_path / "none").stdout == "\n"


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ([], "preflight needs --dist-init-addr HOST:PORT"),
        (["--dist-init-addr", "10.0.0.1"], "legal: HOST:PORT"),
        (["--dist-init-addr", "10.0.0.1:70000"], "legal: HOST:PORT, port 1..65535"),
        (["--dist-init-addr", "10.0.0.1:65534"], "ports up to PORT+3 are used; legal: up to 65532"),
        (["--dist-init-addr", "10.0.0.1:29500", "--node-rank", "2"], "--node-rank 2: legal with --nnodes 2: 0..1"),
        (["--dist-init-addr", "10.0.0.1:29500", "--tell-for", "nan"], "--tell-for nan: legal: 0 or more seconds"),
        (["--dist-init-addr", "10.0.0.1:29500", "--tell-for", "-1"], "--tell-for -1: legal: 0 or more seconds"),
    ],
)
def test_a_wish_that_cannot_be_met_is_one_line(args: list[str], sentence: str) -> None:
    done = run(*args)
    assert done.returncode == 2 and sentence in done.stderr and done.stderr.count("\n") == 1
