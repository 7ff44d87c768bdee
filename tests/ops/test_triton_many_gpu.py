"""Every tile that tuning may choose for many FP8 rows, on a GPU, against the reference. Run by hand where one is."""

from __future__ import annotations

import pytest
import torch

from rocm_serve.ops import tiles
from rocm_serve.ops.bind import OPS
from rocm_serve.ops.contract import Arguments
from rocm_serve.ops.fp8_linear.cases import fp8_linear_case
from rocm_serve.ops.moe_experts import hidden_unquantised
from rocm_serve.ops.moe_experts.cases import experts_case
from tests.ops.on_gpu import SEED, SEED_VARIABLE, arch, in_dialect, outputs, why_wrong
from tests.ops.test_references import error
from tests.ops.test_tiles_moe import SHAPES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
    pytest.mark.filterwarnings("ignore:::triton"),
]
BF16 = torch.bfloat16
WIDTH, ROWS = 640, 777  # columns that no tile of 256 fits, rows that none of 64 does


def tried(kernel: str, **shape: int) -> list[tiles.Tile]:
    here = arch() or "sm_90"
    found: list[tiles.Tile] = []
    for rows in (512, 2048, 8192):
        bits = 16 if kernel == "fp8_linear" and here.startswith("sm_") else 8
        found += tiles.candidates(kernel, {**shape, "rows": rows, "bits": bits}, here)
    return [tile for i, tile in enumerate(found) if tile not in found[:i]]


def of_models() -> list[tuple[int, tiles.Tile]]:
    """List the tiles of every model's experts, each with their width."""
    found = [(shape["i"], tile) for shape in SHAPES.values() for tile in tried("moe_experts", **shape)]
    return [one for i, one in enumerate(found) if one not in found[:i] and not one[1]["FEW"]]


def words(tile: tiles.Tile) -> str:
    return " ".join(f"{name}{size}" for name, size in tile.items() if size)


def judge(op: str, tile: tiles.Tile, made: Arguments) -> None:
    made = in_dialect(made)
    expected = OPS[op].reference(**made)
    with tiles.forced(op, tile):
        first, again = (outputs(OPS[op], "triton", made)[0].cpu() for _ in range(2))
    assert torch.equal(first, again), "a run repeats its bits"
    assert (why := why_wrong(op, first, expected, made)) is None, f"{why}; {SEED_VARIABLE}={SEED}"


@pytest.mark.parametrize("tile", tried("fp8_linear", n=WIDTH, k=WIDTH, fp8=1), ids=words)
def test_products(tile: tiles.Tile) -> None:
    g = torch.Generator().manual_seed(SEED)
    for rows in (0, 1, ROWS):
        judge("fp8_linear", tile, fp8_linear_case(g, BF16, t=rows, k=WIDTH, n=WIDTH, activation="fp8_1x128"))


@pytest.mark.parametrize(("width", "tile"), of_models(), ids=lambda one: words(one) if isinstance(one, dict) else one)
def test_experts(width: int, tile: tiles.Tile) -> None:
    """All rows choose one expert, nobody two of them; others are elsewhere; rows of padding."""
    g = torch.Generator().manual_seed(SEED)
    formats = {"fp8": True, "activation": "fp8_1x128"}
    sizes = {"t": ROWS, "live": ROWS - 14, "h": WIDTH, "i": width, "e": 6, "e_all": 9, "k": 3, "idle": 2}
    judge("moe_experts", tile, experts_case(g, BF16, one_expert=True, **sizes, **formats))


@pytest.mark.parametrize("rows", [300, 528])
@pytest.mark.parametrize(("h", "i"), [(256, 256), (2048, 512)])
def test_experts_are_as_right_as_the_reference(h: int, i: int, rows: int) -> None:
    """Codes of hidden rows may be others than the reference's, so the bound is wide; a kernel that is wrong is not."""
    g = torch.Generator().manual_seed(SEED)
    made = in_dialect(experts_case(g, BF16, t=rows, h=h, i=i, e=16, k=4, fp8=True, activation="fp8_1x128"))
    exact = hidden_unquantised.moe_experts(**made).double()
    theirs = error(OPS["moe_experts"].reference(**made).float(), exact)
    ours = error(outputs(OPS["moe_experts"], "triton", made)[0].cpu().float(), exact)
    assert ours == pytest.approx(theirs, rel=0.02), f"{SEED_VARIABLE}={SEED}"
