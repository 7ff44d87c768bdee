"""What --trace writes, and a disk that takes no more."""

from __future__ import annotations

from pathlib import Path

import pytest

from rocm_serve.trace import StepTrace, read_trace, tracing

STEPS = [StepTrace(seq, 1, 1, 1, 10 * seq, 10 * seq + 5) for seq in range(3)]


def test_each_step_is_there_as_soon_as_it_is_written(tmp_path: Path) -> None:
    with tracing(str(tmp_path / "new"), "core") as trace:
        assert trace is not None
        for count, step in enumerate(STEPS, 1):
            trace(step)
            assert read_trace(tmp_path / "new" / "core.jsonl", StepTrace) == STEPS[:count]
    with tracing(None, "core") as none:
        assert none is None


def test_a_full_disk_ends_the_trace_with_one_line_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "core.jsonl"
    path.symlink_to("/dev/full")
    with tracing(str(tmp_path), "core") as trace:
        assert trace is not None
        for step in STEPS:
            trace(step)
    assert caplog.messages == [f"--trace: {path} ends at step 0: No space left on device"]
