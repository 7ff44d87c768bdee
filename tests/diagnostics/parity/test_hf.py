"""The program that is HF's side: what it says while it runs, and how it may end."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rocm_serve.diagnostics.parity import hf
from rocm_serve.diagnostics.parity.drive import Scored
from rocm_serve.errors import UserError

SEQUENCES = [Scored(1, [5, 6], [])]
ANSWERS = """
import pathlib, sys
sys.stderr.write("a warning of a library\\n" * 20000)
print("a library speaks", flush=True)
for done in (2, 7):
    print(done, 7, flush=True)
pathlib.Path(sys.argv[-1], "answer.json").write_text('{"noise": [0.5], "rows": [[{"6": -1.0}]]}')
"""


def run(program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[object, list[tuple[int, int]]]:
    ticks: list[tuple[int, int]] = []
    (tmp_path / "program.py").write_text(program)
    monkeypatch.setattr(hf, "PROGRAM", tmp_path / "program.py")
    found = hf.run(
        Path("model"),
        SEQUENCES,
        tmp_path / "B",
        os.environ,
        vocab_used=9,
        tick=lambda done, tokens: ticks.append((done, tokens)),
    )
    return found, ticks


def test_its_progress_is_passed_on_and_what_else_it_says_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, ticks = run(ANSWERS, tmp_path, monkeypatch)
    assert ticks == [(2, 7), (7, 7)]
    assert found == ([Scored(1, [5, 6], [{6: -1.0}])], [0.5])


def test_its_last_words_are_said_when_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="program.py, ended with exit code 1: (.|\n)*ValueError: no such weights"):
        run("raise ValueError('no such weights')", tmp_path, monkeypatch)
    with pytest.raises(UserError, match="exit code 7: no word"):
        run("raise SystemExit(7)", tmp_path, monkeypatch)


def test_whoever_stops_waiting_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import os, time; print(os.getpid(), 7, flush=True); time.sleep(600)"
    (tmp_path / "program.py").write_text(program)
    monkeypatch.setattr(hf, "PROGRAM", tmp_path / "program.py")
    pids: list[int] = []

    def stop(done: int, tokens: int) -> None:
        pids.append(done)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hf.run(Path("model"), SEQUENCES, tmp_path / "B", os.environ, vocab_used=9, tick=stop)
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)
