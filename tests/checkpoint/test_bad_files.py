"""Whatever lies where a file of a checkpoint should: one line that names it, before anything is started."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from rocm_serve.checkpoint.reader import CheckpointReader, read_config
from rocm_serve.diagnostics.plan import survey
from rocm_serve.errors import UserError
from rocm_serve.tokens.tokenizer import Tokenizer

FILES = ("config.json", "generation_config.json", "model.safetensors.index.json", "tokenizer.json") + (
    *("tokenizer_config.json", "chat_template.jinja"),
)
TOO_LONG = "a" * 256
KINDS: dict[str, bytes | Callable[[Path], None]] = {
    "a folder": Path.mkdir,
    "a link to a name too long": lambda path: path.symlink_to(TOO_LONG),
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
    if isinstance(data, bytes):
        (tmp_path / name).write_bytes(data)
    else:
        data(tmp_path / name)
    if name == "chat_template.jinja" and isinstance(data, bytes) and kind in TEXT:
        assert Tokenizer.from_dir(tmp_path).chat_template == (data.decode() or None)
        return
    with pytest.raises(UserError) as refused:
        read(tmp_path)
    said = str(refused.value)
    assert name in said and "\n" not in said and len(said) < 400


@pytest.mark.parametrize("look", [read_config, CheckpointReader, survey, Tokenizer.from_dir])
def test_a_folder_that_the_system_refuses_to_look_into_is_one_line(look: Callable[[Path], object]) -> None:
    with pytest.raises(UserError, match=f"^{TOO_LONG}[^\\n]*: File name too long$"):
        look(Path(TOO_LONG))


@pytest.mark.parametrize("refused", ["stat", "open"])
def test_a_shard_that_the_system_refuses_is_one_line_with_its_name(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    """As for a user without the right to it, before its header is read and after."""

    def denied(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with CheckpointReader(checkpoints["text-fp8"]) as known, CheckpointReader(checkpoints["text-fp8"]) as new:
        name, file = next(iter(known.names.items()))
        info, says = known.info(name), f"^{re.escape(str(known.path / file))}: Permission denied$"
        monkeypatch.setattr(Path, refused, denied)
        with pytest.raises(UserError, match=says):
            new.info(name)
        monkeypatch.setattr(os, "open", denied)
        with pytest.raises(UserError, match=says):
            list(known.read(info, tuple(slice(0, size) for size in info.shape)))
