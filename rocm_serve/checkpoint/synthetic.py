"""Write a small random checkpoint in a published layout: weights in shards with an index, configs, tokenizer.

The same seed writes the same bytes. The model is random: it answers nonsense, but every path of the server runs.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import cast

from safetensors.torch import save_file
from torch import Tensor

from rocm_serve.checkpoint.synthetic_configs import (
    DIMS,
    Dims,
    DimsName,
    JsonObject,
    Layout,
    MtpFormat,
    check_wish,
    generation_config,
    model_config,
)
from rocm_serve.checkpoint.synthetic_tensors import tensors
from rocm_serve.checkpoint.synthetic_tokenizer import write_tokenizer
from rocm_serve.errors import UserError

_SHARD_BYTES = 12 << 20
_LAST = "config.json"


def make_checkpoint(
    out: str | Path, layout: str, mtp: str, seed: int = 0, *, dims: str = "default", layers: int | None = None
) -> Path:
    """Write a checkpoint into the directory `out` (made if missing) and return its path.

    `layers` overrides the number of layers (tests of pipelines and of speed).
    Errors: UserError for an unknown layout, an impossible MTP format, a directory that holds another model or cannot
    be written to.
    """
    check_wish(layout, mtp, dims)
    path = Path(out)
    if path.exists() and not path.is_dir():
        raise UserError(f"{path} is not a directory")
    if path.is_dir() and any(path.iterdir()) and not (path / "synthetic.json").exists():
        raise UserError(f"{path} is not empty and was not written by make-checkpoint; choose another directory")
    sizes = DIMS[cast(DimsName, dims)]
    sizes = replace(sizes, layers=layers) if layers is not None else sizes
    wish: JsonObject = {"layout": layout, "mtp": mtp, "seed": seed, "dims": dims, "layers": sizes.layers}
    try:
        with _whole(path, wish) as part:
            write_model(part, cast(Layout, layout), cast(MtpFormat, mtp), sizes, seed)
    except OSError as error:
        raise UserError(f"cannot write to {error.filename or path}: {error.strerror or error}") from error
    return path


@contextmanager
def _whole(path: Path, wish: JsonObject) -> Iterator[Path]:
    """Give a folder to write to whose files then move to `path`, config.json last: without it nothing is a model.

    The folder is inside `path`, which may be a mount. An old model loses its config.json first.
    """
    path.mkdir(parents=True, exist_ok=True)
    _write_json(path / "synthetic.json", wish)
    for stale in (path / _LAST, *path.glob("model-*.safetensors")):
        stale.unlink(missing_ok=True)
    part = path / ".part"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    try:
        yield part
        for file in sorted(part.iterdir(), key=lambda file: file.name == _LAST):
            file.replace(path / file.name)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def write_model(path: Path, layout: Layout, mtp: MtpFormat, dims: Dims, seed: int) -> None:
    """Write every file of a checkpoint into the folder `path`, which is there."""
    ids = write_tokenizer(path, rows=dims.vocabulary, max_position=dims.max_position)
    _write_json(path / "config.json", model_config(layout, mtp, dims, ids))
    _write_json(path / "generation_config.json", generation_config(ids))
    _write_shards(path, layout, mtp, dims, seed)


def _write_shards(path: Path, layout: Layout, mtp: MtpFormat, dims: Dims, seed: int) -> None:
    shards: list[dict[str, Tensor]] = [{}]
    filled = total = 0
    for name, tensor in tensors(layout, mtp, dims, seed):
        size = tensor.numel() * tensor.element_size()
        if shards[-1] and filled + size > _SHARD_BYTES:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += size
        total += size
    weight_map = {}
    for i, shard in enumerate(shards, start=1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, path / file, metadata={"format": "pt"})
        (path / file).chmod(0o644)
        weight_map |= dict.fromkeys(shard, file)
    index: JsonObject = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    _write_json(path / "model.safetensors.index.json", index)


def _write_json(path: Path, value: JsonObject) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
