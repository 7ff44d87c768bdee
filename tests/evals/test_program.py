"""The programs of evals/ refuse what they cannot do as the server does: one line, exit code 2, before any work."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from evals import bench_drafting, plain_gate
from evals.bench_gpu.__main__ import main as bench_gpu
from evals.bench_host.__main__ import main as bench_host
from evals.planted.__main__ import main as planted
from evals.program import EXIT_INTERRUPTED, ended
from evals.tiny import generator, train

ROOT = Path(__file__).parents[2]
MODEL, REFERENCE = ROOT / "evals/tiny/checkpoint", ROOT / "evals/references/tiny-gsm8k-synth.jsonl"
RESULTS = ROOT / "evals/bench_gpu/results/h200-2026-12-01-decode.json"
PLAIN = f"--model {MODEL} --reference {REFERENCE} --out {{made}}"


@pytest.mark.parametrize(
    ("main", "words", "said"),
    [
        (bench_gpu, "decode --cpu --steps 0", "--steps: 0: legal: 1 or more"),
        (bench_gpu, "decode --cpu --budget-s nan", "--budget-s: nan: legal: 0 or more seconds"),
        (bench_gpu, "decode --cpu --json {folder}", "--json {folder}: Is a directory"),
        (
            bench_gpu,
            "decode --cpu --shape tiny --ctx 99999",
            "--ctx ask for 100077 tokens of a sequence; legal with tiny: 16384",
        ),
        (bench_gpu, "prefill --cpu --shape tiny", "--rows, --kinds and --most ask for 32832 tokens of a sequence"),
        (
            bench_gpu,
            "decode --cpu --shape tiny --ctx 16 --only nothing",
            "--only nothing: no such case; legal: attention",
        ),
        (bench_gpu, "plot --json {results} --plot /dev/full", "--plot /dev/full: No space left on device"),
        (bench_gpu, "table --json {junk}", "--json {junk}: JSON is malformed"),
        (bench_gpu, "plot --json {results} --plot {absent}/x.svg", "{absent}: No such file"),
        (bench_gpu, "table --json {absent}/x.json", "x.json: No such file or directory; legal: a file that this"),
        (bench_host, "--model {absent}", "{absent} has no config.json"),
        (bench_host, "--running 0", "--running: 0: legal: 1 or more"),
        (bench_host, "--json {absent}/x.json", "{absent}: No such file"),
        (bench_drafting.main, "--model {absent} --rounds 0", "--rounds: 0: legal: 1 or more"),
        (plain_gate.main, PLAIN + " --data {absent}", "--data {absent}"),
        (plain_gate.main, PLAIN + " --data {absent} --limit -1", "--limit: -1: legal: 1 or more"),
        (plain_gate.main, PLAIN.replace("{made}", "{junk}") + " --data {absent}", "--out {junk}: File exists"),
        (planted, "table --out {junk}", "--out {junk} does not hold results, a line each"),
        (planted, "ledger --out {folder}", "--out {folder}: Is a directory"),
        (generator.main, "--out {junk}", "--out {junk}: File exists"),
        (train.main, "--out {made} --tokenizer {absent}", "--tokenizer {absent}: there is no tokenizer.json"),
    ],
)
def test_what_cannot_be_is_one_line_and_exit_code_2(
    main: Callable[[], int],
    words: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "junk").write_bytes(b"\xff junk\n")
    places = {name: str(tmp_path / name) for name in ("junk", "made", "absent")}
    places |= {"folder": str(tmp_path), "results": str(RESULTS)}
    monkeypatch.setattr(sys, "argv", ["program", *words.format(**places).split()])
    try:
        code = ended("program", main)
    except SystemExit as refused:  # by argparse, which says how the program is called before it
        code = refused.code
    complaint = capsys.readouterr().err.splitlines()[-1]
    assert code == 2 and said.format(**places) in complaint


def test_ctrl_c_is_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt

    assert ended("program", interrupted) == EXIT_INTERRUPTED and not capsys.readouterr().err
