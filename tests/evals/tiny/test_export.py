"""Files and back: every value where the reader looks for it, the tokenizer given, nothing left over."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from evals.tiny.export import TOKENIZER_FILES, fill, named, published, read, write
from evals.tiny.modules import build
from tests.evals.tiny.test_modules import IDS, SMALL

CHECKPOINT = Path(__file__).parents[3] / "evals" / "tiny" / "checkpoint"
DIMS = replace(SMALL, hidden=128, expert_width=128, vocabulary=1024)


def masters(seed: int) -> dict[str, torch.Tensor]:
    model, mtp = build(DIMS, IDS, seed)
    return {name: p.detach() for name, p in named(model, mtp)}


def test_what_is_written_is_read_again_by_name(tmp_path: Path) -> None:
    tensors = published(masters(1))
    write(tmp_path, tensors, DIMS, CHECKPOINT)
    again = read(tmp_path)
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[name].float(), tensor.float()) for name, tensor in tensors.items())
    model, mtp = build(DIMS, IDS, 2)
    fill(model, mtp, again)
    for name, p in named(model, mtp):
        expected = masters(1)[name]
        close = (p - expected).abs() <= 0.065 * expected.abs() + 0.002 * expected.abs().max()
        assert close.all(), name


def test_the_tokenizer_of_the_folder_itself_stays(tmp_path: Path) -> None:
    """The writer makes a tokenizer of its own in the folder: it once took the place of the learnt one."""
    for name in TOKENIZER_FILES:
        shutil.copyfile(CHECKPOINT / name, tmp_path / name)
    write(tmp_path, published(masters(1)), DIMS, tmp_path)
    for name in TOKENIZER_FILES:
        assert (tmp_path / name).read_bytes() == (CHECKPOINT / name).read_bytes()


def test_a_tensor_too_many_or_of_another_shape_is_refused(tmp_path: Path) -> None:
    tensors = published(masters(1))
    with pytest.raises(AssertionError, match="no place for .'model.extra.weight'"):
        write(tmp_path / "a", tensors | {"model.extra.weight": torch.zeros(2)}, DIMS, CHECKPOINT)
    with pytest.raises(AssertionError, match="model.norm.weight is not as the writer has it"):
        write(tmp_path / "b", tensors | {"model.norm.weight": torch.zeros(2)}, DIMS, CHECKPOINT)
    with pytest.raises(AssertionError, match="no parameter for .'model.extra.weight'"):
        fill(*build(DIMS, IDS, 2), tensors | {"model.extra.weight": torch.zeros(2)})
