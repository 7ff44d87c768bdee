"""Files are written whole, or the sentence says why not and what was there stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from rocm_serve.errors import UserError
from rocm_serve.outputs import write_file


def test_what_was_there_stays_until_the_new_one_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.json"
    write_file("--json", path, b"first")
    taken = Path.write_bytes

    def full(path: Path, content: bytes) -> int:
        taken(path, content[:2])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        with pytest.raises(UserError, match=r"^--json .*run\.json: No space left on device$"):
            write_file("--json", path, b"second")
    assert path.read_bytes() == b"first" and list(tmp_path.iterdir()) == [path]
    write_file("--json", path, b"second")
    assert path.read_bytes() == b"second"


def test_a_device_takes_bytes_and_is_not_replaced() -> None:
    write_file("--json", Path("/dev/null"), b"x")
    assert Path("/dev/null").is_char_device()
    with pytest.raises(UserError, match="No space left on device"):
        write_file("--json", Path("/dev/full"), b"x")
