"""Results that cannot be read are refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from evals.bench_gpu import pair
from evals.bench_gpu.__main__ import main


@pytest.mark.parametrize("program", [main, pair.main])
@pytest.mark.parametrize("words", [None, "{", '{"machine": 1}'])
def test_results_that_cannot_be_read(program, words, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    results = tmp_path / "results.json"
    if words is not None:
        results.write_text(words)
    assert program(["table", "--json", str(results)]) == 2
    told = capsys.readouterr().err
    assert str(results) in told and told.count("\n") == 1
