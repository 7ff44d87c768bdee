"""Folders of runs: one that is held stays, one that is not stays for a day, and others' are left alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rocm_serve.run_directory import KEPT_S, LOCK, run_directory

HOLDER = """
from rocm_serve.run_directory import run_directory
with run_directory() as mine:
    print(mine.path, flush=True)
    input()
"""


@pytest.fixture(autouse=True)
def place(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    parent = tmp_path_factory.mktemp("r")
    monkeypatch.setenv("TMPDIR", str(parent))
    monkeypatch.setattr("tempfile.tempdir", None)
    yield parent
    monkeypatch.setattr("tempfile.tempdir", None)


def left_by_a_killed_process() -> Path:
    with subprocess.Popen([sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        path = Path(holder.stdout.readline().decode().strip())
        holder.kill()
    assert (path / "logs" / "node.log").exists()
    return path


def grow_old(path: Path, by_s: float = KEPT_S + 60) -> None:
    then = path.stat().st_mtime - by_s
    for one in (*path.rglob("*"), path):
        os.utime(one, (then, then))


def test_a_run_that_ends_well_leaves_nothing_and_one_that_failed_its_logs(place: Path) -> None:
    with run_directory() as well:
        assert (well.path / "logs" / "node.log").exists()
    with run_directory() as failed:
        failed.keep = True
    assert list(place.iterdir()) == [failed.path]


def test_what_a_killed_run_left_stays_for_a_day_and_goes_at_the_next_start(place: Path) -> None:
    path = left_by_a_killed_process()
    with run_directory():
        assert path.exists(), "somebody may want its logs"
    grow_old(path)
    with run_directory() as mine:
        assert list(place.iterdir()) == [mine.path]


def test_a_log_that_was_written_to_today_keeps_its_folder() -> None:
    path = left_by_a_killed_process()
    grow_old(path)
    os.utime(path / "logs" / "node.log")
    with run_directory():
        assert path.exists()


def test_the_folder_of_a_run_that_lives_stays_however_old() -> None:
    with run_directory() as old:
        grow_old(old.path)
        with run_directory():
            assert old.path.exists()


def test_a_folder_that_is_no_run_directory_is_left_alone(place: Path) -> None:
    strange, lock_is_a_folder = place / "rocm-serve-notes", place / "rocm-serve-odd"
    (strange / "logs").mkdir(parents=True)
    (lock_is_a_folder / LOCK).mkdir(parents=True)
    grow_old(strange)
    grow_old(lock_is_a_folder)
    with run_directory():
        assert strange.exists() and lock_is_a_folder.exists()
