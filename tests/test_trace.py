"""What --trace writes, a disk that takes no more, and files of servers that were killed."""

from __future__ import annotations

from pathlib import Path

import msgspec
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


@pytest.mark.parametrize("cut", [1, 5])  # with 1 the step is all there but for its end
def test_a_file_that_was_cut_in_its_last_line_is_read_up_to_it(
    cut: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "core.jsonl"
    with tracing(str(tmp_path), "core") as trace:
        assert trace is not None
        for step in STEPS:
            trace(step)
    whole = path.read_bytes()
    assert read_trace(path, StepTrace) == STEPS and not caplog.messages
    path.write_bytes(whole[:-cut])
    assert read_trace(path, StepTrace) == STEPS[:-1]
    left = len(b"[2,1,1,1,20,25]\n") - cut
    assert caplog.messages == [f"{path}: the last line was cut after {left} bytes and is left out"]


def test_a_broken_line_before_the_last_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "core.jsonl"
    path.write_bytes(b"[0,1,1,1,0\n[1,1,1,1,10,15]\n")
    with pytest.raises(msgspec.DecodeError):
        read_trace(path, StepTrace)
