"""The command `gate`: wishes that cannot be met are said before anything runs, and progress is readable."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rocm_serve.cli_gate import app
from rocm_serve.diagnostics.gate import flow, folder, lm_eval
from rocm_serve.diagnostics.gate.folder import held
from rocm_serve.diagnostics.gate.lm_eval import Harness
from rocm_serve.errors import UserError
from tests.diagnostics.gate import made
from tests.diagnostics.gate.oracle import Oracle, Serving, write_data

ROOT = Path(__file__).parents[1]


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[Serving]:
    with Serving(Oracle(write_data(tmp_path / "data", 10))) as running:
        yield running


@pytest.fixture(autouse=True)
def lm_eval_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Finding it is tested below; no test here comes as far as running it."""
    monkeypatch.setattr(lm_eval, "find_harness", lambda python, environ: Harness(python, "0.4.13", Path("tasks")))


def refused(*words: str) -> str:
    done = CliRunner().invoke(app, ["gsm8k", *words])
    assert isinstance(done.exception, UserError), (done.exception, done.output)
    return str(done.exception)


def test_every_wish_is_checked_before_a_question_is_asked(serving: Serving, tmp_path: Path) -> None:
    made.paired(tmp_path / "r", 10)
    made.paired(tmp_path / "short", 8)
    base = ("--base-url", serving.url, "--data", str(tmp_path / "data"), "--out", str(tmp_path / "out"), "--reference")
    good = (*base, str(tmp_path / "r"))
    for more, why in (
        (("--task", "mmlu"), "--task mmlu: legal: gsm8k, gsm8k-synth"),
        (("--task", "gsm8k"), "--task gsm8k: the reference 'invented' is of gsm8k-synth"),
        (("--limit", "0"), "--limit 0: legal: 1..10"),
        (("--limit", "11"), "--limit 11: legal: 1..10"),
        (("--alpha", "0.5"), "--alpha 0.5: legal: above 0, below 0.5"),
        (("--num-concurrent", "0"), "--num-concurrent 0: legal: 1 or more"),
        (("--base-url", "host"), "--base-url host is no URL of a server; legal: http://HOST:PORT"),
        (("--base-url", "http://127.0.0.1:99999"), "legal: http://HOST:PORT or https://HOST:PORT, port 1..65535"),
        (("--base-url", "http://127.0.0.1:9"), "GET http://127.0.0.1:9/v1/models: connection refused"),
        (("--base-url", f"{serving.url}/other"), f"GET {serving.url}/other/v1/models: HTTP 404"),
        (("--data", str(tmp_path / "none")), "no train.jsonl and no test.jsonl"),
    ):
        assert why in refused(*good, *more), more
    assert "No such file" in refused(*base, str(tmp_path / "none"))
    (tmp_path / "deep").write_text("[" * 100_000)
    assert "its first line is no header" in refused(*base, str(tmp_path / "deep"))
    assert "legal: --limit 1..8" in refused(*base, str(tmp_path / "short"))
    assert serving.oracle.asked == [] and not (tmp_path / "out").exists()


def test_data_the_reference_was_not_made_with_are_refused(serving: Serving, tmp_path: Path) -> None:
    made.write_reference(
        tmp_path / "r",
        made.header(num_questions=10, data_sha256={"test.jsonl": "0" * 64}),
        [made.question(one) for one in made.samples(10)],
    )
    words = ("--base-url", serving.url, "--reference", str(tmp_path / "r"), "--data", str(tmp_path / "data"))
    assert "test.jsonl has sha256" in refused(*words, "--out", str(tmp_path / "out"))


def test_an_interpreter_without_lm_eval_is_told_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    with pytest.raises(UserError, match=r"pip install 'lm-eval\[api\]==0.4.13', or --lm-eval-python PYTHON"):
        lm_eval.find_harness(str(bare), {})
    with pytest.raises(UserError, match="No such file"):
        lm_eval.find_harness(str(tmp_path / "none"), {})
    with pytest.raises(UserError, match="is no Python .* exit code 1 and said: nothing"):
        lm_eval.find_harness("/bin/false", {})
    bare.write_text("#!/bin/sh\necho 5\n")
    with pytest.raises(UserError, match="is no Python .* exit code 0 and said: 5"):
        lm_eval.find_harness(str(bare), {})


def test_a_folder_that_cannot_be_one_is_refused_before_anything_runs(serving: Serving, tmp_path: Path) -> None:
    """The synthetic task's questions would be made in it, which takes seconds."""
    made.paired(tmp_path / "r", 10)
    (tmp_path / "file").write_text("")
    words = ("--base-url", serving.url, "--reference", str(tmp_path / "r"), "--out")
    assert refused(*words, str(tmp_path / "file")) == f"--out {tmp_path / 'file'}: Not a directory"
    assert "Not a directory" in refused(*words, str(tmp_path / "file" / "below"))
    assert "Not a directory" in refused(*words, str(tmp_path / "file"), "--data", str(tmp_path / "data"))


@pytest.fixture
def good(serving: Serving, tmp_path: Path) -> list[str]:
    made.paired(tmp_path / "r", 10)
    given = {"base-url": serving.url, "reference": tmp_path / "r", "data": tmp_path / "data", "out": tmp_path / "out"}
    return [word for flag, value in given.items() for word in (f"--{flag}", str(value))]


def test_a_second_gate_in_the_same_folder_is_refused_while_the_first_runs(good: list[str], tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from rocm_serve.diagnostics.gate.folder import held\n"
        "with held(Path(sys.argv[1])) as mine: mine.says('run-007'); print('held', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "out")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as first:
        assert first.stdout is not None and first.stdout.readline() == b"held\n"
        said = [refused(*good), refused(*good, "--fresh")]
        first.kill()
    where = tmp_path / "out" / "run-007"
    assert said == [f"a gate is running in {where} (pid {first.pid}); --out takes another folder"] * 2
    assert not list((tmp_path / "out").glob("run-*")), "the refused one left nothing"
    with held(tmp_path / "out"):
        pass


def test_what_is_left_of_a_run_and_cannot_be_read_is_one_line(good: list[str], tmp_path: Path) -> None:
    run = tmp_path / "out" / "run-001"
    run.mkdir(parents=True)
    (run / "run.json").write_bytes(b'{"protocol_sha256": "12')
    assert refused(*good).startswith(f"{run / 'run.json'} cannot be read: ")
    assert refused(*good).endswith("; --fresh begins a new run")


@pytest.mark.parametrize("blocked", ["lm_eval.out", "answers.jsonl", "tasks"])
def test_a_file_that_cannot_be_written_is_one_line_and_names_it(
    good: list[str], tmp_path: Path, blocked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "open_run", lambda out, begun, fresh: (run, begun, []))
    run = tmp_path / "out" / "run-001"
    for name in ("lm_eval.out", "answers.jsonl"):
        (run / name).mkdir(parents=True) if name == blocked else None
    if blocked == "tasks":
        run.mkdir(parents=True)
        (run / blocked).write_text("")
    assert str(run / blocked) in refused(*good)


def test_what_nobody_foresaw_ends_in_2_with_its_traceback(good: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """1 is a verdict on the server."""

    def broken(*_: object) -> None:
        raise ZeroDivisionError("nobody foresaw this")

    monkeypatch.setattr(flow.Gate, "run", broken)
    done = CliRunner().invoke(app, ["gsm8k", *good])
    assert done.exit_code == 2 and "ZeroDivisionError: nobody foresaw this" in done.output
