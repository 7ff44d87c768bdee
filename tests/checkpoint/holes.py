"""Turn a checkpoint into one with the same headers and no data, so that a test may change any header."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from rocm_serve.checkpoint.reader import CheckpointReader
from tests.checkpoint.published import write_holes

Headers = dict[str, tuple[str, tuple[int, ...]]]  # name -> dtype, shape
FILES = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def headers_of(path: Path) -> Headers:
    reader = CheckpointReader(path)
    return {name: (reader.info(name).dtype, reader.info(name).shape) for name in reader.names}


def hollow(source: Path, out: Path, headers: Headers) -> Path:
    """Write `headers` as two shards of holes with an index, beside `source`'s configuration."""
    out.mkdir(exist_ok=True)
    for name in ("config.json", "generation_config.json"):
        shutil.copy(source / name, out / name)
    every = [(name, dtype, shape) for name, (dtype, shape) in headers.items()]
    half = len(every) // 2
    weight_map: dict[str, str] = {}
    for file, shard in zip(FILES, (every[:half], every[half:]), strict=True):
        write_holes(out / file, shard)
        weight_map |= dict.fromkeys((name for name, _, _ in shard), file)
    write_index(out, weight_map)
    return out


def write_index(out: Path, weight_map: dict[str, str]) -> None:
    (out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def read_index(out: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    return found
