"""Ends and progress of commands whose exit code 1 is a verdict."""

from __future__ import annotations

import errno
import io
import os
import signal
from pathlib import Path

import pytest
import typer
from rich.console import Console

from rocm_serve.cli_verdict import Pace, progress_line, progress_of, verdict_or_2
from rocm_serve.errors import UserError


def test_a_line_of_progress() -> None:
    assert progress_line(0, 1319, 0.0) == "0 of 1319 answers"
    assert progress_line(319, 1319, 2.0) == "319 of 1319 answers, 2.00/s, 8.3 min left"


def test_the_pace_counts_from_the_first_answer_of_this_session() -> None:
    pace = Pace()
    assert [pace.rate(0, 10.0), pace.rate(0, 40.0), pace.rate(8, 50.0)] == [0.0, 0.0, 0.0]
    assert pace.rate(28, 60.0) == 2.0


def test_without_a_terminal_the_end_is_always_said_and_not_every_step() -> None:
    out = io.StringIO()
    with progress_of(Console(file=out, force_terminal=False), "tokens") as tick:
        for there in range(8):
            tick(there, 7, there)
        tick(7, 7, 7)
    assert [line.partition(" tokens")[0] for line in out.getvalue().splitlines()] == ["7 of 7"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_cleans_up_undisturbed_and_ends_in_130(number: signal.Signals) -> None:
    done: list[str] = []
    with pytest.raises(typer.Exit) as ended, verdict_or_2(Path("out"), lambda: done.append("said")):
        try:
            os.kill(os.getpid(), number)
            done.append("went on")
        finally:
            os.kill(os.getpid(), number)  # an impatient user
            done.append("cleaned up")
    assert ended.value.exit_code == 130 and done == ["cleaned up", "said"]


def test_errors_end_in_2_in_one_line_where_they_are_the_users_or_the_disks() -> None:
    for error, words in (
        (UserError("--x 1: legal: 2"), "--x 1: legal: 2"),
        (OSError(errno.ENOSPC, "No space left on device"), "out: No space left on device"),
        (PermissionError(errno.EACCES, "Permission denied", "out/a"), "out/a: Permission denied"),
    ):
        with pytest.raises(UserError) as refused, verdict_or_2(Path("out"), lambda: None):
            raise error
        assert str(refused.value) == words


def test_what_nobody_foresaw_is_no_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended, verdict_or_2(Path("out"), lambda: None):
        raise KeyError("nobody foresaw this")
    assert ended.value.exit_code == 2 and "KeyError: 'nobody foresaw this'" in capsys.readouterr().err


@pytest.mark.parametrize("code", [0, 1])
def test_a_verdict_is_passed_on(code: int) -> None:
    with pytest.raises(typer.Exit) as ended, verdict_or_2(Path("out"), lambda: None):
        raise typer.Exit(code)
    assert ended.value.exit_code == code
