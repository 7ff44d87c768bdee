"""Loading for gfx942: the same numbers in e4m3fnuz, whatever the layout, the cut, and the source."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rocm_serve.checkpoint.load import dummy_fill, load_stage
from rocm_serve.checkpoint.reader import CheckpointReader
from rocm_serve.ops.fp8 import FN, FNUZ, FNUZ_SCALE
from rocm_serve.parallel.layout import shape_at
from rocm_serve.parallel.mesh import Coord, Mesh
from tests.checkpoint.test_load import table

FP8_LAYOUTS = ["text-fp8", "text-fp8-mtp-bf16", "vl-fp8"]


def filled(path: Path, coord: Coord, fp8: torch.dtype, *, dummy: bool = False) -> dict[str, Tensor]:
    with CheckpointReader(path) as reader:
        facts, params = table(reader, coord)
        dtypes = {"model": torch.bfloat16, "float32": torch.float32, "fp8": fp8}
        into = {name: torch.full(shape_at(p, coord.place), torch.nan).to(dtypes[p.dtype]) for name, p in params.items()}
        if dummy:
            dummy_fill(params, coord, into, seed=5)
        else:
            load_stage(reader, facts, coord, params, into)
        return into


def compare(fn: dict[str, Tensor], fnuz: dict[str, Tensor]) -> int:
    """Check every tensor of one load against the other; return how many are FP8."""
    assert fn.keys() == fnuz.keys()
    turned = {name for name, tensor in fn.items() if tensor.dtype is FN}
    for name, tensor in fn.items():
        if name in turned:
            assert fnuz[name].dtype is FNUZ
            assert torch.equal(fnuz[name].double() * FNUZ_SCALE, tensor.double()), name
        elif name.removesuffix("_scale_inv") in turned:
            assert torch.equal(fnuz[name], tensor * FNUZ_SCALE), name
        else:
            assert torch.equal(fnuz[name], tensor), name
    return len(turned)


@pytest.mark.parametrize(
    ("name", "tp", "rank", "dummy"),
    [*((name, 1, 0, False) for name in FP8_LAYOUTS), (FP8_LAYOUTS[0], 2, 1, False), (FP8_LAYOUTS[0], 2, 1, True)],
)
def test_a_stage_in_fnuz_holds_the_same_numbers(
    checkpoints: dict[str, Path], name: str, tp: int, rank: int, dummy: bool
) -> None:
    coord = Mesh(tp, 1).coord(rank)
    fn, fnuz = (filled(checkpoints[name], coord, fp8, dummy=dummy) for fp8 in (FN, FNUZ))
    assert compare(fn, fnuz) > 4


def test_a_checkpoint_without_fp8_is_untouched(checkpoints: dict[str, Path]) -> None:
    coord = Mesh(1, 1).coord(0)
    assert compare(*(filled(checkpoints["text-bf16"], coord, fp8) for fp8 in (FN, FNUZ))) == 0


def test_all_256_codes_of_a_file_arrive_with_their_meaning(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    for file in checkpoints["text-fp8"].iterdir():
        (tmp_path / file.name).symlink_to(file)
    key = "model.layers.0.mlp.experts.0.down_proj.weight"
    (where,) = [p for p in tmp_path.glob("*.safetensors") if key in load_file(p)]
    tensors = load_file(where)
    codes = tensors[key].view(torch.uint8).flatten()
    codes[:256] = torch.arange(256, dtype=torch.uint8)
    tensors[key] = codes.view(tensors[key].shape).view(FN)
    where.unlink()
    save_file(tensors, where)
    coord = Mesh(1, 1).coord(0)
    fn, fnuz = (
        filled(tmp_path, coord, fp8)["model.layers.0.mlp.experts.down_proj"].flatten()[:256].double()
        for fp8 in (FN, FNUZ)
    )
    assert fn.isnan().sum() == 2 and torch.equal(fn.isnan(), fnuz.isnan())
    assert torch.equal(fn.nan_to_num(), fnuz.nan_to_num() * FNUZ_SCALE)
