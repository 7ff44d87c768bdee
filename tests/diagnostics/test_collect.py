"""The report: everything somebody else needs, and no secret, wherever it was planted."""

from __future__ import annotations

import json
import os
import tarfile
import tempfile
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocm_serve.diagnostics.collect import MOST_OF_A_LOG, find_run_dir, plan_lines, write_report
from rocm_serve.diagnostics.record import REDACTED, Redactor, record_start, sounds_secret
from rocm_serve.errors import UserError
from rocm_serve.platform.facts import Platform
from tests.executor.wishes import resolved

SECRET = "Zq7-planted/secret+value"
MACHINE = Platform(device="cpu", arch="x86_64", cores=2, free_ram_bytes=10**9)


def files_of(archive: Path) -> dict[str, str]:
    with tarfile.open(archive) as tar:
        return {m.name.split("/", 1)[1]: tar.extractfile(m).read().decode() for m in tar.getmembers()}  # type: ignore[union-attr]


def run_dir(path: Path, model: Path, environ: dict[str, str]) -> Path:
    (path / "logs").mkdir(parents=True)
    argv = ["rocm-serve", "serve", "--api-key", SECRET, f"--auth-token={SECRET}", "--model", str(model)]
    record_start(resolved(model=str(model), tp=2, pp=2), MACHINE, environ, argv, path)
    (path / "logs" / "rank-0.log").write_text(f"Authorization: Bearer abcdef{SECRET}\nfetched with {SECRET} at last\n")
    (path / "logs" / "core.log").write_text("https://user:hunter22@host/x\nHF_TOKEN=hf_abcdefghijklmnopqrst\nstep 5\n")
    return path


def test_a_planted_secret_is_nowhere_in_the_archive(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    environ = {"HF_TOKEN": SECRET, "SLURM_JWT": SECRET, "NCCL_DEBUG": "INFO", "EDITOR": "vi", "NCCL_X": f"a{SECRET}"}
    directory = run_dir(tmp_path / "run", checkpoints["text-fp8"], environ)
    for file in directory.glob("*.json"):
        assert SECRET not in file.read_text()
    names = write_report(directory, tmp_path / "out.tar.gz", environ)
    files = files_of(tmp_path / "out.tar.gz")
    assert list(files) == names
    assert set(names) == {
        "report.json",
        "resolved.json",
        "started.json",
        "plan.txt",
        "logs/core.log",
        "logs/rank-0.log",
    }
    for name, text in files.items():
        for secret in (SECRET, "hunter22", "hf_abcdefghijklmnopqrst"):
            assert secret not in text, name
    assert json.loads(files["started.json"])["environment"] == {
        "NCCL_DEBUG": "INFO",
        "NCCL_X": f"a{REDACTED}",
        "SLURM_JWT": REDACTED,
    }
    assert "step 5" in files["logs/core.log"] and "at last" in files["logs/rank-0.log"]
    assert (tmp_path / "out.tar.gz").stat().st_mode & 0o077 == 0


def test_a_report_holds_versions_configuration_and_what_each_stage_was_to_hold(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    directory = run_dir(tmp_path / "run", checkpoints["text-fp8"], {})
    write_report(directory, tmp_path / "out.tar.gz", {})
    files = files_of(tmp_path / "out.tar.gz")
    wish = resolved(model=str(checkpoints["text-fp8"]), tp=2, pp=2)
    assert msgspec.json.decode(files["resolved.json"], type=type(wish)) == wish
    assert json.loads(files["started.json"])["versions"]["torch"].startswith("2.")
    assert json.loads(files["started.json"])["versions"]["amd-mori"] == "not installed"
    assert files["plan.txt"].splitlines() == list(plan_lines(wish))
    assert [line.split(":")[0] for line in plan_lines(wish)] == ["ranks 0..1 (stage 0)", "ranks 2..3 (stage 1)"]
    shared = resolved(model=wish.model, tp=2, pp=2, ep=2, expert_exchange="torch", expert_capacity=64)
    assert len(list(plan_lines(shared))) == 2 and list(plan_lines(shared)) != list(plan_lines(wish))


def test_a_model_that_is_gone_is_said_in_the_plan_and_stops_nothing(tmp_path: Path) -> None:
    (line,) = plan_lines(resolved(model="gone"))
    assert line.startswith("no plan: gone")


@pytest.mark.parametrize(
    "broken", [b"", b'{"a": "\xff"}', b'{"tp": 1}', b"[" * 100_000], ids=["empty", "bytes", "old", "deep"]
)
def test_a_broken_file_is_said_in_its_place_and_the_rest_is_packed(tmp_path: Path, broken: bytes) -> None:
    """A full disk, a killed process, a run of another version."""
    (tmp_path / "logs" / "rank-1.log").mkdir(parents=True)
    (tmp_path / "logs" / "rank-0.log").write_bytes(b"the end\xff\n")
    (tmp_path / "resolved.json").write_bytes(broken)
    (tmp_path / "started.json").write_bytes(broken)
    write_report(tmp_path, tmp_path / "out.tar.gz", {})
    files = files_of(tmp_path / "out.tar.gz")
    assert files["logs/rank-0.log"].startswith("the end")
    assert files["logs/rank-1.log"].startswith("rank-1.log cannot be read: ")
    assert files["plan.txt"].startswith("resolved.json cannot be read: ")


def test_a_long_log_keeps_its_end(tmp_path: Path) -> None:
    (tmp_path / "run" / "logs").mkdir(parents=True)
    (tmp_path / "run" / "logs" / "a.log").write_bytes(b"x" * (MOST_OF_A_LOG + 10) + b"\nthe end\n")
    write_report(tmp_path / "run", tmp_path / "out.tar.gz", {})
    text = files_of(tmp_path / "out.tar.gz")["logs/a.log"]
    assert text.startswith("[the first 19 bytes are left out]") and text.endswith("the end\n")


def test_the_newest_run_directory_is_taken_unless_one_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(UserError, match="no run directory .*; legal: --run-dir DIR"):
        find_run_dir(None)
    for age, name in enumerate(("new", "old")):
        path = tmp_path / f"rocm-serve-{name}"
        path.mkdir()
        (path / "resolved.json").write_text("{}")
        os.utime(path, (1000 - age, 1000 - age))
    (tmp_path / "rocm-serve-other").mkdir()
    assert find_run_dir(None).name == "rocm-serve-new"
    assert find_run_dir(tmp_path / "rocm-serve-old").name == "rocm-serve-old"
    with pytest.raises(UserError, match="is no run directory"):
        find_run_dir(tmp_path / "rocm-serve-other")


def test_an_archive_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--out .*: No such file or directory"):
        write_report(tmp_path, tmp_path / "absent" / "out.tar.gz", {})


@pytest.mark.parametrize(
    "name", ["HF_TOKEN", "ROCM_SERVE_API_KEY", "--api-key", "OPENAI_API_KEY", "password", "SLURM_JWT", "db.secret"]
)
def test_names_that_sound_secret(name: str) -> None:
    assert sounds_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        *("--max-total-tokens", "ROCM_SERVE_MAX_TOTAL_TOKENS", "--max-num-batched-tokens"),
        *("page_size", "tokenizer", "eos_token_ids", "keyboard"),
    ],
)
def test_names_of_settings_do_not(name: str) -> None:
    assert not sounds_secret(name)


@given(st.text(min_size=6, max_size=40).filter(lambda s: s.strip()), st.text(max_size=80), st.text(max_size=80))
def test_the_value_of_a_secret_variable_survives_in_no_text(value: str, before: str, after: str) -> None:
    clean = Redactor({"API_KEY": value}).text(f"{before}{value}{after}")
    assert value not in clean.replace(REDACTED, "\0")


@pytest.mark.parametrize(
    "line",
    [
        "effective num_pages = 500  (memory of rank 3 (stage 1): 5 MB for caches, a page 4 KB)",
        "rank 0: planned 1 KB (weights 900 bytes, caches 100 bytes), allocated 1.1 KB (+10.00%)",
        "max_total_tokens = none",
        "--max-total-tokens 300 --tp 2",
        '{"eos_token_ids": [1, 2], "max_total_tokens": null}',
    ],
)
def test_ordinary_lines_stay_as_they_are(line: str) -> None:
    assert Redactor({}).text(line) == line
