"""Children of the supervisor: named when they die, ended with it, never left over."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from rocm_serve.children import PEER_LOST, SENT_AWAY, TORCH_GUARDS, Child, child_environment, describe, end_processes
from rocm_serve.supervisor import Supervisor
from tests.executor.wishes import resolved


def python(code: str, **options: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdin=subprocess.PIPE, **options)  # type: ignore[call-overload]


def gone(pid: int, within_s: float = 20) -> bool:
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        try:
            status = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return True
        if status.rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.02)
    return False


CHILD = """
import time
from rocm_serve.lifeline import die_with_parent
die_with_parent()
print("up", flush=True)
time.sleep({seconds})
print("alive")
"""


def test_a_child_with_a_lifeline_dies_with_a_killed_parent() -> None:
    parent = python(
        f"""
        import subprocess, sys, time
        options = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        child = subprocess.Popen([sys.executable, "-c", {CHILD.format(seconds=600)!r}], **options)
        assert child.stdout.readline().startswith(b"up")
        print(child.pid, flush=True)
        time.sleep(600)
        """,
        stdout=subprocess.PIPE,
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    os.kill(child, 0)
    end_processes([parent], grace_s=0, term_s=0)
    parent.stdout.close()
    assert gone(child)


def test_a_process_started_by_hand_is_left_alone() -> None:
    command = [sys.executable, "-c", CHILD.format(seconds=0.3)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=True)
    assert done.stdout == b"up\nalive\n"


def test_end_processes_ends_the_deaf_too() -> None:
    deaf = python(
        """
        import signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("up", flush=True)
        time.sleep(600)
        """,
        stdout=subprocess.PIPE,
    )
    leaving = python("import time; time.sleep(0.2)")
    sleeping = python("import time; time.sleep(600)")
    assert deaf.stdout is not None
    deaf.stdout.readline()
    end_processes([deaf, leaving, sleeping], grace_s=2.0, term_s=0.3)
    deaf.stdout.close()
    assert leaving.returncode == 0
    assert sleeping.returncode == -signal.SIGTERM
    assert deaf.returncode == -signal.SIGKILL


def test_a_user_error_is_its_sentence_alone(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    log.write_text("12:00:00 loading\n12:00:01 error: tp 3 cannot be used; legal: 1, 2, 4\n")
    assert describe("rank-0", 2, log) == "tp 3 cannot be used; legal: 1, 2, 4"


def test_a_crash_is_told_with_signal_and_the_end_of_the_log(tmp_path: Path) -> None:
    log = tmp_path / "rank-1.log"
    log.write_text("".join(f"line {i}\n" for i in range(100)))
    told = describe("rank-1", -signal.SIGKILL, log)
    assert told.startswith(f"rank-1 ended with signal SIGKILL; the end of {log}:")
    assert told.endswith("line 99") and "line 80\n" not in told
    assert "exit code 7" in describe("core", 7, log)


def test_a_core_that_failed_is_the_cause_before_the_ranks_that_it_sent_away(tmp_path: Path) -> None:
    def ended(name: str, rank: int | None, code: int) -> Child:
        with python(f"raise SystemExit({code})") as process:
            process.wait()
        return Child(name, rank, process, tmp_path / "x.log", tmp_path / "x.beat")

    away, core = ended("rank-0", 0, SENT_AWAY), ended("core", None, 1)
    suffered, culprit = ended("rank-2", 2, PEER_LOST), ended("rank-3", 3, 1)
    found = sorted([away, core, suffered, culprit], key=lambda child: child.guilt)
    assert found == [culprit, suffered, core, away]


def test_children_share_the_cores_and_meet_on_the_loopback() -> None:
    given = {"PATH": "/bin", "OMP_NUM_THREADS": "64"}
    env = child_environment(resolved(torch_threads=3), given)
    assert env == {"PATH": "/bin", "OMP_NUM_THREADS": "3", "GLOO_SOCKET_IFNAME": "lo", **TORCH_GUARDS}
    assert given["OMP_NUM_THREADS"] == "64"


def test_ranks_of_several_hosts_meet_on_the_interface_that_was_found_each_library_in_its_own_syntax() -> None:
    wish = resolved(tp=2, pp=2, nnodes=2, node_rank=1, members=2, member=1, interface="eth7", address="10.0.0.2")
    env = child_environment(wish, {"NCCL_SOCKET_IFNAME": "mine", "TORCH_NCCL_ENABLE_MONITORING": "1"}, rank=3)
    assert env["GLOO_SOCKET_IFNAME"] == env["MORI_SOCKET_IFNAME"] == "eth7"
    assert (env["NCCL_SOCKET_IFNAME"], env["TORCH_NCCL_ENABLE_MONITORING"]) == ("mine", "1"), "the user's word is kept"
    assert child_environment(wish, {})["NCCL_SOCKET_IFNAME"] == "=eth7"
    assert [env[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")] == ["3", "4", "1", "2"]


@pytest.mark.multirank
def test_a_worker_that_cannot_start_ends_everything_with_its_sentence(tmp_path: Path) -> None:
    wish = resolved(tp=1, pp=1, run_dir=str(tmp_path), model=str(tmp_path / "no-such-model"))
    sentences: list[str] = []
    lines: list[str] = []
    supervisor = Supervisor(wish, dict(os.environ), on_failure=sentences.append, echo=lines.append)
    supervisor.start()
    pids = supervisor.pids
    assert set(pids) == {"core", "rank-0"}
    assert all(gone(pid, within_s=60) for pid in pids.values())
    supervisor.stop()
    assert supervisor.exit_code == 2 and sentences == [supervisor.failure]
    assert "no-such-model" in sentences[0] and "\n" not in sentences[0]
    assert any(line.startswith("[rank-0] ") for line in lines)
    assert not [path for path in tmp_path.iterdir() if path.is_socket()]
