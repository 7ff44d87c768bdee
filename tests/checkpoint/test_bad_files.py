"""Whatever lies where a file of a checkpoint should: one line that names it, before anything is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from rocm_serve.checkpoint.reader import CheckpointReader, read_config
from rocm_serve.errors import UserError
from rocm_serve.tokens.tokenizer import Tokenizer

FILES = ("config.json", "generation_config.json", "model.safetensors.index.json", "tokenizer.json") + (
    *("tokenizer_config.json", "chat_template.jinja"),
)
KINDS: dict[str, bytes | None] = {
    "a folder": None,
    "empty": b"",
    "not UTF-8": b'{"a": "\xff"}',
    "a list": b"[1, 2]",
    "cut": b'{"a": [1,',
    "brackets without end": b'{"a": ' + b"[" * 100_000,
    "digits without end": b'{"a": ' + b"1" * 5_000 + b"}",
}
TEXT = ("a list", "cut", "brackets without end", "digits without end", "empty")  # a template may be any text, or none


def read(folder: Path) -> None:
    read_config(folder)
    with CheckpointReader(folder):
        pass
    Tokenizer.from_dir(folder)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FILES)
def test_what_is_no_such_file_is_one_line_with_its_name(
    checkpoints: dict[str, Path], tmp_path: Path, name: str, kind: str
) -> None:
    for file in checkpoints["text-fp8"].iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / name).unlink()
    data = KINDS[kind]
    if data is None:
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).write_bytes(data)
    if name == "chat_template.jinja" and kind in TEXT:
        assert Tokenizer.from_dir(tmp_path).chat_template == ((data or b"").decode() or None)
        return
    with pytest.raises(UserError) as refused:
        read(tmp_path)
    said = str(refused.value)
    assert name in said and "\n" not in said and len(said) < 400
