"""The gate that keeps a skip from passing unseen."""

from __future__ import annotations

from pathlib import Path

import pytest

GATE = (Path(__file__).parents[1] / "skip_gate.py").read_text(encoding="utf-8")
SKIPPING = """
import pytest

def test_runs():
    pass

@pytest.mark.skip(reason="no such device")
def test_left_out():
    pass
"""


def run_gate(pytester: pytest.Pytester, allowed: str, *args: str) -> pytest.RunResult:
    pytester.makeconftest(GATE)
    pytester.makepyfile(test_it=SKIPPING)
    pytester.path.joinpath("allowed.txt").write_text(allowed, encoding="utf-8")
    return pytester.runpytest_subprocess("-p", "no:cacheprovider", *args)


def test_a_skip_that_no_pattern_names_fails_the_run(pytester: pytest.Pytester) -> None:
    result = run_gate(pytester, "# nothing is allowed\n", "--allowed-skips=allowed.txt")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*not named in allowed.txt: test_it.py::test_left_out"])
    result.assert_outcomes(passed=1, skipped=1)


def test_a_named_skip_passes(pytester: pytest.Pytester) -> None:
    result = run_gate(pytester, "test_it.py::test_left_* # no such device\n", "--allowed-skips=allowed.txt")
    assert result.ret == pytest.ExitCode.OK


def test_the_gate_sees_skips_of_xdist_workers(pytester: pytest.Pytester) -> None:
    result = run_gate(pytester, "", "--allowed-skips=allowed.txt", "-n", "2")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*not named in allowed.txt: test_it.py::test_left_out"])


def test_without_the_option_a_skip_is_only_reported(pytester: pytest.Pytester) -> None:
    assert run_gate(pytester, "").ret == pytest.ExitCode.OK
