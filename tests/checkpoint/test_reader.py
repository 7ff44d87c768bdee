"""Slices come back as numpy would cut them, and no more is read than the rule allows."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from rocm_serve.checkpoint.reader import CheckpointReader, TensorInfo, read_config
from rocm_serve.errors import UserError
from tests.checkpoint.holes import FILES, headers_of, hollow, read_index, write_index

Slices = tuple[slice, ...]


def assemble(reader: CheckpointReader, info: TensorInfo, where: Slices, block_bytes: int) -> np.ndarray[Any, Any]:
    """Put the blocks together, and check that they tile the slice and that none is larger than a block or a row."""
    shape = tuple(s.stop - s.start for s in where)
    out = np.zeros(shape, np.dtype(f"<u{info.nbytes // max(1, prod(info.shape))}"))
    hits = np.zeros(shape, int)
    for block in reader.read(info, where, block_bytes):
        out[block.at] = block.bits
        hits[block.at] += 1
        row = prod(info.shape[-1:]) if len(info.shape) < 3 else max(info.shape[-1], prod(info.shape[1:]))
        assert block.bits.size <= max(block_bytes // out.itemsize, row)
    assert (hits == 1).all()
    return out


@st.composite
def slices(draw: st.DrawFn) -> tuple[tuple[int, ...], Slices, int, int]:
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=4)))
    spans = []
    for size in shape:
        start = draw(st.integers(0, size - 1))
        spans.append(draw(st.sampled_from([slice(0, size), slice(start, draw(st.integers(start + 1, size)))])))
    return shape, tuple(spans), draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 60))


@given(case=slices(), seed=st.integers(0, 2**32 - 1))
def test_a_slice_is_what_numpy_cuts_and_row_slices_read_nothing_else(
    tmp_path_factory: pytest.TempPathFactory, case: tuple[tuple[int, ...], Slices, int, int], seed: int
) -> None:
    shape, where, width, block_bytes = case
    path = tmp_path_factory.mktemp("slices")
    array = np.random.default_rng(seed).integers(0, 2 ** (8 * width) - 1, shape, dtype=f"<u{width}")
    save_file({"before": np.zeros(3, np.uint8), "x": array, "y": np.zeros(2, np.uint8)}, path / "model.safetensors")
    with CheckpointReader(path) as reader:
        got = assemble(reader, reader.info("x"), where, block_bytes)
        assert (got == array[where]).all()
        assert reader.bytes_kept == array[where].nbytes
        whole_rows = len(shape) == 1 or where[-1] == slice(0, shape[-1])
        if whole_rows:
            assert reader.bytes_read == reader.bytes_kept
        else:
            rows = prod(s.stop - s.start for s in where[:-1])
            assert reader.bytes_kept <= reader.bytes_read <= rows * shape[-1] * width


def test_a_fused_expert_tensor_is_never_read_whole(tmp_path: Path) -> None:
    experts, wide, hidden = 6, 40, 16
    array = np.random.default_rng(3).integers(0, 65535, (experts, 2 * wide, hidden), dtype="<u2")
    save_file({"gate_up": array, "down": array.transpose(0, 2, 1).copy()}, tmp_path / "model.safetensors")
    reader = CheckpointReader(tmp_path)
    for half in (slice(10, 20), slice(50, 60)):
        got = assemble(reader, reader.info("gate_up"), (slice(0, experts), half, slice(0, hidden)), 1 << 20)
        assert (got == array[:, half]).all()
    assert reader.bytes_read == reader.bytes_kept == array.nbytes // 4
    info = reader.info("down")
    largest = 0
    for block in reader.read(info, (slice(0, experts), slice(0, hidden), slice(10, 20)), 400):
        base = block.bits if block.bits.base is None else block.bits.base
        largest = max(largest, base.nbytes)
    assert largest <= 400 < info.nbytes


def test_empty_slices_and_scalars_are_read(tmp_path: Path) -> None:
    save_file(
        {"s": np.array(7, np.uint32), "x": np.arange(6, dtype=np.uint8).reshape(2, 3)}, tmp_path / "model.safetensors"
    )
    reader = CheckpointReader(tmp_path)
    (scalar,) = reader.read(reader.info("s"), ())
    assert scalar.bits == 7
    assert list(reader.read(reader.info("x"), (slice(1, 1), slice(0, 3)))) == []


def test_headers_agree_with_the_safetensors_library(checkpoints: dict[str, Path]) -> None:
    from safetensors import safe_open

    for path in checkpoints.values():
        ours = headers_of(path)
        theirs = {}
        for file in sorted(path.glob("*.safetensors")):
            with safe_open(file, "pt") as shard:
                for name in shard.keys():  # noqa: SIM118 - the handle is not a mapping
                    theirs[name] = (shard.get_slice(name).get_dtype(), tuple(shard.get_slice(name).get_shape()))
        assert ours == theirs


def test_only_headers_of_asked_shards_are_read(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    path = hollow(checkpoints["dense"], tmp_path / "x", headers_of(checkpoints["dense"]))
    (path / FILES[1]).write_bytes(b"not a shard")
    reader = CheckpointReader(path)
    assert reader.info("model.embed_tokens.weight").shape == (2048, 256)
    with pytest.raises(UserError, match=r"00002.safetensors is not a safetensors file"):
        reader.info("mtp.fc.weight")
    assert reader.bytes_read == 0


def one_line(caught: pytest.ExceptionInfo[UserError]) -> bool:
    return "\n" not in str(caught.value)


def test_what_is_not_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a directory; legal: a directory with config.json"):
        CheckpointReader(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"neither model.safetensors.index.json nor model.safetensors"):
        CheckpointReader(tmp_path)
    (tmp_path / "alone").write_text("{}")
    with pytest.raises(UserError, match="alone is a file; legal: a directory with config.json"):
        read_config(tmp_path / "alone")
    with pytest.raises(UserError, match=r"has no config.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config.json is not JSON") as caught:
        read_config(tmp_path)
    assert one_line(caught)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(UserError, match="does not hold a JSON object"):
        read_config(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": 3}')
    with pytest.raises(UserError, match=r"is not a safetensors index: .*weight_map"):
        CheckpointReader(tmp_path)


@pytest.mark.parametrize("keep", [0, 7, 8, 200, -1])
def test_a_truncated_shard_is_refused_before_any_read(checkpoints: dict[str, Path], tmp_path: Path, keep: int) -> None:
    path = hollow(checkpoints["dense"], tmp_path / "x", headers_of(checkpoints["dense"]))
    with (path / FILES[0]).open("r+b") as stream:
        stream.truncate(keep if keep >= 0 else (path / FILES[0]).stat().st_size - 1)
    reader = CheckpointReader(path)
    with pytest.raises(UserError, match=r"00001-of-00002.safetensors.* truncated") as caught:
        reader.info("model.embed_tokens.weight")
    assert one_line(caught)
    assert reader.bytes_read == 0


def test_a_shard_that_shrinks_while_it_is_read_is_named(tmp_path: Path) -> None:
    save_file({"x": np.arange(4000, dtype=np.uint8)}, tmp_path / "model.safetensors")
    reader = CheckpointReader(tmp_path)
    info = reader.info("x")
    with (tmp_path / "model.safetensors").open("r+b") as stream:
        stream.truncate(info.offset + 1000)
    with pytest.raises(UserError, match="ends inside x: the file is truncated"):
        list(reader.read(info, (slice(0, 4000),)))


def test_an_index_that_names_a_missing_file_is_refused(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    path = hollow(checkpoints["dense"], tmp_path / "x", headers_of(checkpoints["dense"]))
    write_index(path, read_index(path) | {"lm_head.weight": "model-00003-of-00003.safetensors"})
    reader = CheckpointReader(path)  # of a node that may need other files only
    with pytest.raises(UserError, match="names model-00003-of-00003.safetensors, but .* has no such file") as caught:
        reader.info("lm_head.weight")
    assert one_line(caught)
    write_index(path, read_index(path) | {"lm_head.weight": "../model.safetensors"})
    with pytest.raises(UserError, match="names "):
        CheckpointReader(path)


def test_an_index_that_disagrees_with_a_shard_is_refused(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    path = hollow(checkpoints["dense"], tmp_path / "x", headers_of(checkpoints["dense"]))
    index = read_index(path)
    write_index(path, index | {"lm_head.weight": FILES[0] if index["lm_head.weight"] == FILES[1] else FILES[1]})
    reader = CheckpointReader(path)
    with pytest.raises(UserError, match="the index places lm_head.weight in .* but that file does not hold it"):
        reader.info("lm_head.weight")
    with pytest.raises(UserError, match="holds lm_head.weight, which the index does not place there"):
        reader.check_shards(set(FILES))


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"dtype": "BF16", "shape": [3], "data_offsets": [0, 4]}, r"x BF16\[3\] does not fit its 4 bytes"),
        ({"dtype": "BF16", "shape": [2], "data_offsets": [4, 0]}, "does not fit its -4 bytes"),
        ({"dtype": 3}, "has a broken safetensors header"),
    ],
)
def test_a_header_that_contradicts_itself_is_refused(tmp_path: Path, entry: dict[str, Any], said: str) -> None:
    text = json.dumps({"x": entry}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(64))
    with pytest.raises(UserError, match=said):
        CheckpointReader(tmp_path)
