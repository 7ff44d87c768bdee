"""The whole gate: the real lm-eval against a server that knows the answers, as many of them as a test wants."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from rocm_serve.cli_gate import app
from rocm_serve.diagnostics.gate.protocol import Protocol
from rocm_serve.diagnostics.gate.reference import (
    Header,
    Published,
    Question,
    Reference,
    read_reference,
    write_reference,
)
from tests.diagnostics.gate.made import header
from tests.diagnostics.gate.oracle import Oracle, Serving, write_data

pytestmark = pytest.mark.slow
N = 60
WRONG = frozenset({3})
PROTOCOL = Protocol(task="gsm8k-synth")
PYTHON = os.environ.get("LM_EVAL_PYTHON", sys.executable)  # of an environment that has lm-eval
ROOT = Path(__file__).parents[3]
OWN_TASKS = Path(__file__).with_name("own_tasks.py")


@dataclass
class Place:
    """A folder with data, and the gate on it."""

    path: Path
    data: Path
    python: str = PYTHON

    def gate(self, url: str, reference: Path, *more: str) -> tuple[int, str, dict[str, Any]]:
        """Run the command; return its exit code, what it printed and its result."""
        out = self.path / "out"
        done = CliRunner().invoke(app, [*arguments(url, reference, self.data, out, self.python), *more])
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        newest = sorted(out.glob("run-*"))[-1]
        return done.exit_code, done.output, json.loads((newest / "result.json").read_text(encoding="utf-8"))

    def floor(self, score: float) -> Path:
        published = Published(1319, {"strict-match": score, "flexible-extract": score}, "tests")
        return self.write(header(published=published))

    def write(self, made: Header, questions: Iterable[Question] = ()) -> Path:
        write_reference(self.path / "reference.jsonl", made, questions)
        return self.path / "reference.jsonl"

    def against(self, reference: Reference, wrong: Iterable[int]) -> Path:
        """Write the reference with other verdicts: wrong where the caller says so."""
        bad = set(wrong)
        questions = [
            msgspec.structs.replace(one, verdicts=dict.fromkeys(one.verdicts, one.doc_id not in bad))
            for one in reference.questions.values()
        ]
        return self.write(reference.header, questions)


def arguments(url: str, reference: Path, data: Path, out: Path, python: str) -> list[str]:
    named = {"base-url": url, "reference": reference, "data": data, "out": out, "lm-eval-python": python}
    flags = [word for name, value in named.items() for word in (f"--{name}", str(value))]
    return ["gsm8k", *flags, "--num-concurrent", "8"]


@pytest.fixture(scope="module", autouse=True)
def lm_eval_is_here() -> None:
    if sys.executable == PYTHON and importlib.util.find_spec("lm_eval") is None:
        pytest.skip(
            "lm-eval is not installed: pip install -e '.[dev]', or LM_EVAL_PYTHON=PYTHON of another environment"
        )


@pytest.fixture
def place(tmp_path: Path) -> Place:
    """Its lm-eval is the real one, but for its own tasks: `first` has these, too."""
    quick = tmp_path / "python"
    quick.write_text(f'#!/bin/sh\nexec {shlex.quote(PYTHON)} {shlex.quote(str(OWN_TASKS))} "$@"\n')
    quick.chmod(0o755)
    return Place(tmp_path, write_data(tmp_path / "data", N), str(quick))


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, str, dict[str, Any]]:
    """A run against a floor, with a server that is busy now and then."""
    path = tmp_path_factory.mktemp("first")
    place = Place(path, write_data(path / "data", N))
    with Serving(Oracle(place.data, wrong=WRONG, fail_every=20, accepted=0.85)) as serving:
        return place.gate(serving.url, place.floor(0.95))


@pytest.fixture(scope="module")
def reference(first: tuple[int, str, dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """The answers of that run as a reference."""
    path = tmp_path_factory.mktemp("reference") / "reference.jsonl"
    questions = [
        Question(
            doc_id=one["doc_id"],
            doc_hash=one["doc_hash"],
            prompt_hash=one["prompt_hash"],
            answer=one["answer"],
            verdicts=one["verdicts"],
            tokens=one["tokens"],
        )
        for one in first[2]["runs"][0]
    ]
    write_reference(path, header(num_questions=N, provenance={}), questions)
    return read_reference(path)


def test_a_good_server_passes(first: tuple[int, str, dict[str, Any]]) -> None:
    code, output, result = first
    assert code == 0 and output.rstrip().endswith("PASS")
    table, verdict = output.index("|gsm8k_synth|"), output.index("pass     59 of 60 right")
    assert table < verdict, "lm-eval's own table first"
    assert result["outcome"] == "pass" and result["scores"]["strict-match"]["right"] == 59
    assert result["acceptance"] == pytest.approx(0.85)
    assert any("HTTP 503: " in note for note in result["notes"]), "what was sent again is said"
    (lm_eval,) = result["lm_eval"]
    assert lm_eval["version"] and lm_eval["argv"][1:3] == ["-m", "lm_eval"]
    assert Path(lm_eval["samples"]).is_file()
    assert [one["verdicts"]["strict-match"] for one in result["runs"][0]] == [i not in WRONG for i in range(N)]
    assert all(one["tokens"] and one["latency_s"] and one["finish_reason"] == "stop" for one in result["runs"][0])


def test_the_first_questions_are_those_of_a_whole_run_and_losses_fail_by_mcnemar(
    place: Place, reference: Reference
) -> None:
    """A reference of one half, and seven questions lost: above the floor, and still worse."""
    path = place.against(reference, [*range(25), *range(50, 60)])
    with Serving(Oracle(place.data, wrong=frozenset(range(32)))) as serving:
        code, output, result = place.gate(serving.url, path, "--limit", "50")
    assert code == 1 and result["outcome"] == "fail" and result["scores"]["strict-match"]["questions"] == 50
    (why,) = result["failed"]
    assert "7 lost, 0 gained" in why and "worse than the reference" in why
    assert result["paired"]["lost"] == list(range(25, 32))
    assert output.rstrip().endswith("FAIL")


def test_a_score_just_below_the_floor_is_asked_twice(place: Place) -> None:
    """One far below fails at once: test_verdict.py."""
    with Serving(Oracle(place.data, wrong=frozenset(range(9)))) as serving:
        code, output, result = place.gate(serving.url, place.floor(0.95))
        assert len(serving.oracle.asked) == 2 * N
    assert code == 1 and len(result["runs"]) == 2 and len(result["lm_eval"]) == 2
    assert "close enough for one rerun" in output
    assert result["failed"][0].startswith("both runs together: 51 + 51 of 120 right")


def test_a_run_that_says_nothing_is_invalid_for_every_reason_there_is(place: Place, reference: Reference) -> None:
    questions = list(reference.questions.values())
    questions[50] = msgspec.structs.replace(questions[50], doc_hash="another document")
    questions[51] = msgspec.structs.replace(questions[51], prompt_hash="another prompt")
    path = place.write(reference.header, questions)
    oracle = Oracle(
        place.data,
        empty=frozenset({10, 11}),
        bang=frozenset({20, 21}),
        endless=frozenset(range(30, 36)),
        restart_after=20,
    )
    with Serving(oracle) as serving:
        code, output, result = place.gate(serving.url, path)
    assert code == 2 and output.rstrip().endswith("INVALID")
    for why in (
        "the server was restarted during the run: its start was 'created 1' and became 'created 2'",
        "2 of 60 answers are empty; 0 are allowed",
        "2 of 60 answers are one token or phrase repeated; 0 are allowed",
        "6 of 60 answers are cut off at the token limit; 3 are allowed",
        "1 questions are not the reference's (doc_hash): 50",
        "1 prompts are not the reference's (prompt_hash): 51",
    ):
        assert any(sentence.startswith(why) for sentence in result["invalid"]), (why, result["invalid"])


def test_a_server_that_answers_nothing_is_invalid_and_says_what_it_said(place: Place) -> None:
    with Serving(Oracle(place.data, fail_every=1)) as serving:
        code, _, result = place.gate(serving.url, place.floor(0.95), "--max-retries", "1")
    assert code == 2
    first, second = result["invalid"][:2]
    assert first.startswith("the server answered HTTP 503 ") and first.endswith("; last: too busy"), "the cause"
    assert second.startswith("lm-eval ended with exit code 1"), "and what came of it"


def test_an_interrupted_run_goes_on_where_it_stopped(place: Place, reference: Reference) -> None:
    path = place.against(reference, WRONG)
    out = place.path / "out"
    with Serving(Oracle(place.data, wrong=WRONG, delay_s=0.5)) as serving:
        words = arguments(serving.url, path, place.data, out, place.python)
        command = [sys.executable, "-m", "rocm_serve", "gate", *words]
        child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        journal = out / "run-001" / "answers.jsonl"
        wait_for(lambda: journal.is_file() and journal.read_bytes().count(b"\n") >= 12)
        child.send_signal(signal.SIGTERM)
        said = child.communicate(timeout=120)[0]
        assert child.returncode == 130, said
        assert "the same command continues" in said
        kept = journal.read_bytes().count(b"\n")
        asked = len(serving.oracle.asked)
        assert 12 <= kept < N and not (out / "run-001" / "result.json").exists()
        code, output, result = place.gate(serving.url, path)
        assert code == 0 and f"continues {out / 'run-001'}" in output
        assert len(serving.oracle.asked) - asked == N - kept, "only what was missing reached the server"
    assert result["paired"]["lost"] == [] and len(result["runs"][0]) == N


def wait_for(true: Any, seconds: float = 200) -> None:
    """Wait until something is true. The limit is for a machine where lm-eval takes minutes to start."""
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.05)
