"""Safetensors files by headers and byte ranges: says what is where, and reads no more than a slice needs. No torch.

Bits come back as unsigned integers of the element's width; whoever knows the dtype reinterprets them.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from rocm_serve.errors import UserError

ITEMSIZES: Mapping[str, int] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
}
_BITS: Mapping[int, np.dtype[Any]] = {1: np.dtype("<u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4"), 8: np.dtype("<u8")}
INDEX = "model.safetensors.index.json"
_MAX_HEADER = 1 << 30
_BLOCK_BYTES = 32 << 20

Bits = NDArray[Any]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies. Units: `offset` and `nbytes` are bytes in file `file`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of a slice: `at` are its slices within the slice that was asked for."""

    at: tuple[slice, ...]
    bits: Bits


class _Entry(msgspec.Struct):
    dtype: str = ""
    shape: tuple[int, ...] = ()
    data_offsets: tuple[int, int] = (0, 0)


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Look at a file or folder: what the system refuses becomes one line with its name. Errors: that UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None


class CheckpointReader:
    """Reads one model directory. Headers are read when first asked for, one shard at a time.

    `names` maps every tensor to its file. `bytes_read` and `bytes_kept` count what was read of tensors, and what
    of that was asked for.
    """

    def __init__(self, model_dir: str | Path) -> None:
        self.path = Path(model_dir)
        with naming(self.path):
            is_folder = self.path.is_dir()
        if not is_folder:
            raise UserError(f"{self.path} is not a directory; legal: a directory with config.json and *.safetensors")
        self.bytes_read = 0
        self.bytes_kept = 0
        self._headers: dict[str, dict[str, TensorInfo]] = {}
        self._files: dict[str, int] = {}
        with naming(self.path / INDEX):
            self._indexed = (self.path / INDEX).exists()
        self.names: Mapping[str, str] = self._read_index() if self._indexed else self._read_single()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        for fd in self._files.values():
            os.close(fd)
        self._files.clear()

    def config(self) -> tuple[dict[str, object], dict[str, object] | None]:
        """Return config.json and, if there is one, generation_config.json."""
        return read_config(self.path)

    def info(self, name: str) -> TensorInfo:
        """Say where tensor `name` is.

        Errors: UserError for a broken, truncated or wrong shard.
        """
        file = self.names[name]
        found = self.header(file).get(name)
        if found is None:
            raise UserError(f"{self.path}: the index places {name} in {file}, but that file does not hold it")
        return found

    def header(self, file: str) -> Mapping[str, TensorInfo]:
        """Return what shard `file` holds, by name. A node needs the shards of its own stages only.

        Errors: UserError when the file is not there, or is no such file.
        """
        if file not in self._headers:
            with naming(self.path / file):
                if not (self.path / file).is_file():
                    raise UserError(f"{self.path / INDEX} names {file}, but {self.path} has no such file")
                self._headers[file] = _parse_header(self.path / file, file)
        return self._headers[file]

    def check_shards(self, files: set[str]) -> None:
        """Read the headers of `files` and refuse tensors in them that the index does not name."""
        for file in sorted(files):
            for name in self.header(file):
                if self.names.get(name) != file:
                    raise UserError(f"{self.path}: {file} holds {name}, which the index does not place there")

    def read(self, info: TensorInfo, where: tuple[slice, ...], block_bytes: int = _BLOCK_BYTES) -> Iterator[Block]:
        """Read the slice `where` of a tensor in blocks of about `block_bytes`.

        A slice of whole rows is read alone, run by run; a slice of columns as its enclosing range, some rows at a
        time. Nothing larger than a block (or one row) is held. Bits are views that the next block does not reuse.
        """
        shape = info.shape
        if not shape:
            yield Block((), self._fetch(info, 0, 1).reshape(()))
            return
        cut = max((d for d, s in enumerate(where) if (s.start, s.stop) != (0, shape[d])), default=0)
        if any(s.stop <= s.start for s in where):
            return
        columns = cut == len(shape) - 1 and cut > 0
        axis = cut - 1 if columns else cut
        inner = prod(shape[axis + 1 :])
        step = max(1, block_bytes // (inner * ITEMSIZES[info.dtype]))
        for outer in product(*(range(s.start, s.stop) for s in where[:axis])):
            base = sum(i * prod(shape[d + 1 :]) for d, i in enumerate(outer))
            lead = tuple(slice(i - s.start, i - s.start + 1) for i, s in zip(outer, where, strict=False))
            rest = tuple(slice(0, s.stop - s.start) for s in where[axis + 1 :])
            for first in range(where[axis].start, where[axis].stop, step):
                rows = min(step, where[axis].stop - first)
                start = base + first * inner
                if columns:
                    bits = self._columns(info, start, rows, inner, where[-1])
                else:
                    bits = self._fetch(info, start, rows * inner)
                at = first - where[axis].start
                self.bytes_kept += bits.nbytes
                extent = (1,) * len(lead) + (rows,) + tuple(s.stop for s in rest)
                yield Block((*lead, slice(at, at + rows), *rest), bits.reshape(extent))

    def _columns(self, info: TensorInfo, start: int, rows: int, width: int, columns: slice) -> Bits:
        """Read the range from the first wanted element to the last, and keep the wanted columns."""
        kept = columns.stop - columns.start
        bits = np.empty(rows * width, _BITS[ITEMSIZES[info.dtype]])
        span = (rows - 1) * width + kept
        self._fill(info, start + columns.start, bits[:span])
        return bits.reshape(rows, width)[:, :kept]

    def _fetch(self, info: TensorInfo, start: int, count: int) -> Bits:
        bits = np.empty(count, _BITS[ITEMSIZES[info.dtype]])
        self._fill(info, start, bits)
        return bits

    def _fill(self, info: TensorInfo, start: int, bits: Bits) -> None:
        view = bits.view(np.uint8).data
        position = info.offset + start * bits.itemsize
        done = 0
        with naming(self.path / info.file):
            if info.file not in self._files:
                self._files[info.file] = os.open(self.path / info.file, os.O_RDONLY)
            while done < len(view):
                count = os.preadv(self._files[info.file], [view[done:]], position + done)
                if not count:
                    raise UserError(f"{self.path / info.file} ends inside {info.name}: the file is truncated")
                done += count
        self.bytes_read += done

    def _read_index(self) -> dict[str, str]:
        names = read_index(self.path / INDEX)
        for file in sorted(set(names.values())):
            if os.path.basename(file) != file:
                raise UserError(f"{self.path / INDEX} names {file}, which is not a file of {self.path}")
        return names

    def _read_single(self) -> dict[str, str]:
        file = "model.safetensors"
        with naming(self.path / file):
            is_there = (self.path / file).is_file()
        if not is_there:
            raise UserError(f"{self.path} has neither {INDEX} nor {file}")
        return dict.fromkeys(self.header(file), file)


def read_index(path: Path) -> dict[str, str]:
    """Return the file of every tensor, as an index says; the files themselves need not be there.

    Errors: UserError for what is no index.
    """
    with naming(path):
        data = path.read_bytes()
    try:
        index = msgspec.json.decode(data, type=_Index)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not a safetensors index: {error}") from error
    return {name: sys.intern(file) for name, file in index.weight_map.items()}


def _parse_header(path: Path, file: str) -> dict[str, TensorInfo]:
    size = path.stat().st_size
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > size - 8 or length > _MAX_HEADER:
            raise UserError(f"{path} is not a safetensors file, or it is truncated inside its header")
        text = stream.read(length)
    try:
        entries = msgspec.json.decode(text, type=dict[str, _Entry])
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise UserError(f"{path} has a broken safetensors header: {error}") from error
    entries.pop("__metadata__", None)
    tensors = {}
    for name, entry in entries.items():
        begin, end = entry.data_offsets
        itemsize = ITEMSIZES.get(entry.dtype)
        if begin < 0 or end < begin or (itemsize and end - begin != itemsize * prod(entry.shape)):
            raise UserError(f"{path}: {name} {entry.dtype}{list(entry.shape)} does not fit its {end - begin} bytes")
        if 8 + length + end > size:
            raise UserError(f"{path} is truncated: {name} ends at byte {8 + length + end}, the file at {size}")
        dtype = sys.intern(entry.dtype)
        tensors[name] = TensorInfo(name, dtype, entry.shape, file, 8 + length + begin, end - begin)
    return tensors


def read_config(model_dir: str | Path) -> tuple[dict[str, object], dict[str, object] | None]:
    """Return a model directory's config.json and, if there is one, its generation_config.json.

    Errors: UserError for a missing or unreadable file.
    """
    path = Path(model_dir)
    config = read_object(path / "config.json")
    if config is None and path.is_file():
        raise UserError(f"{path} is a file; legal: a directory with config.json and *.safetensors")
    if config is None:
        raise UserError(f"{path} has no config.json; legal: a directory with config.json and *.safetensors")
    return config, read_object(path / "generation_config.json")


def read_object(path: Path) -> dict[str, object] | None:
    """Return the JSON object in a file; None where there is no such file. Errors: UserError for anything else there."""
    with naming(path):
        if not path.exists():
            return None
        data = path.read_bytes()
    try:
        value = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} does not hold a JSON object")
    return value
