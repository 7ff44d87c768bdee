"""A launch without weights: a configuration and a tokenizer are enough to see a server start, answer and end."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.e2e.harness import Server


@pytest.fixture
def bare(checkpoints: dict[str, Path], tmp_path: Path) -> Path:
    """A folder with everything but the weights and their index."""
    path = tmp_path / "bare"
    path.mkdir()
    for file in checkpoints["text-fp8"].iterdir():
        if "safetensors" not in file.name:
            shutil.copy(file, path)
    return path


@pytest.mark.slow
def test_dummy_weights_need_no_checkpoint_and_every_rank_holds_what_was_planned(bare: Path, tmp_path: Path) -> None:
    flags = ("--load-format", "dummy", "--tp", "2", "--pp", "2", "--device", "cpu", "--max-model-len", "256")
    with Server(bare, tmp_path / "run", flags) as server:
        answer = server.complete(prompt="Hello", max_tokens=4, ignore_eos=True)
        assert answer["usage"]["completion_tokens"] == 4
        said = re.findall(r"rank (\d+): planned .* allocated .* \(\+0\.00%\)", server.log)
    assert sorted(map(int, said)) == [0, 1, 2, 3]


def test_without_dummy_the_same_folder_is_refused(bare: Path, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"ended with code 2(.|\n)*neither model\.safetensors\.index\.json nor"):
        Server(bare, tmp_path / "run", ("--device", "cpu")).start()
