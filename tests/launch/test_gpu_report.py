"""`make test-gpu` on a machine without a GPU, and how it reads what pytest has found."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu_report import ROOT, read_junit, topologies


def test_without_a_gpu_it_says_what_it_could_not_see_and_still_writes_its_file(tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    command = ["make", "test-gpu", f"GPU_PYTHON={sys.executable}", f"GPU_REPORT={out}"]
    # No GPU is visible to the child even where there are some.
    env = {"PATH": "/usr/bin:/bin", "HIP_VISIBLE_DEVICES": "", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, check=False)
    assert run.returncode != 0
    (sentence,) = [line for line in run.stdout.splitlines() if line.startswith("test-gpu: ")]
    assert "sees no GPU on this machine" in sentence and "no op, no executor" in sentence
    report = json.loads(out.read_text())
    assert (report["ok"], report["sentence"], report["gpu"]["kind"]) == (False, sentence, "none")
    assert report["versions"]["torch"].startswith("2.")


def test_outcomes_are_read_from_pytest(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest

        def test_good(): pass
        def test_bad(): assert 1 == 2
        def test_left_out(): pytest.skip("no GPU")
        @pytest.fixture
        def broken(): raise OSError("gone")
        def test_broken(broken): pass
        """
    )
    junit = pytester.path / "junit.xml"
    pytester.runpytest_subprocess(f"--junitxml={junit}", "-p", "no:cacheprovider")
    found = {test["name"].rpartition("::")[2]: test for test in read_junit(junit)}
    assert {name: test["outcome"] for name, test in found.items()} == {
        "test_good": "passed",
        "test_bad": "failure",
        "test_left_out": "skipped",
        "test_broken": "error",
    }
    assert "1 == 2" in found["test_bad"]["why"] and "no GPU" in found["test_left_out"]["why"]


def test_only_topologies_that_the_gpus_allow_are_served() -> None:
    assert topologies(1) == [(1, 1)]
    assert topologies(2) == [(1, 1), (2, 1), (1, 2)]
    assert topologies(8) == [(1, 1), (2, 1), (1, 2), (2, 2)]
