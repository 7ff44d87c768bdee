"""Tiles of the experts of many rows: they fit a card's shared memory, and are what the kernels can run."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from rocm_serve.executor.experts_memory import RETURNED_BYTES, workspace_bytes
from rocm_serve.ops import tiles
from rocm_serve.ops.moe_experts.cases import CASES
from rocm_serve.ops.tiles_moe import MOST_FEW_ROWS
from rocm_serve.ops.tiles_moe_grouped import BN, deep_of
from tests.ops.test_tiles_moe import SHAPES, SHARED_MEMORY

ROWS = [MOST_FEW_ROWS << power for power in range(1, 8)]
POINTS = list(product(SHAPES, ROWS, SHARED_MEMORY, (8, 16)))
OUT_BYTES = 2  # a result waits in shared memory for its store


def held(tile: tiles.Tile, part: str, shape: dict[str, int], arch: str) -> int:
    """Count the bytes of weights, rows and results that a kernel keeps in shared memory."""
    deep, size = deep_of(shape["bits"]), shape["bits"] // 8
    # gfx942 keeps one stage of two in registers
    stages = tile[f"{part}_STAGES"] - (arch == "gfx942")
    if part == "UP":
        return stages * (2 * BN + tile["BM"]) * deep * size
    columns = BN // 2 if tile["DOWN_HALVES"] else BN
    if not tile["DOWN_HELD"]:
        return stages * (columns + tile["BM"]) * deep * size + OUT_BYTES * columns * tile["BM"] * bool(tile["TILED"])
    depth = -(-shape["i"] // deep)
    rows = tile["BM"] * (2 if tile["DOWN_SHORT"] else 1)
    return depth * deep * size * (rows + stages * columns) + OUT_BYTES * columns * tile["BM"]


@pytest.mark.parametrize(("name", "rows", "arch", "bits"), POINTS)
def test_what_is_tried_fits_and_is_tried_once(name: str, rows: int, arch: str, bits: int) -> None:
    shape = {**SHAPES[name], "rows": rows, "bits": bits}
    tried = [tile for tile in tiles.candidates("moe_experts", shape, arch) if not tile["FEW"]]
    assert tried and all(one not in tried[:i] for i, one in enumerate(tried))
    for tile in tried:
        assert tile.keys() == tried[0].keys()
        assert tile["BM"] >= 32 or not (tile["UP_SHORT"] or tile["DOWN_SHORT"]), "half a tile is 16 rows at least"
        assert not (tile["UP_DESC"] or tile["DOWN_DESC"]) or (arch == "sm_90" and bits == 8)
        assert not tile["DOWN_PROGRAMS"] or (tile["TILED"] and not tile["DOWN_HELD"] and not tile["DOWN_SHORT"])
        assert not (tile["UP_REGS"] or tile["DOWN_REGS"]) or bits == 8, "rows of bytes are FP8"
        assert max(held(tile, part, shape, arch) for part in ("UP", "DOWN")) <= SHARED_MEMORY[arch], tile


def test_cases_of_the_op_reach_these_kernels() -> None:
    for name in ("many rows", "many rows, fp8 weights and rows"):
        made = CASES[name](torch.Generator().manual_seed(0), torch.bfloat16)
        ids, w2 = made["ids_Tk"], made["w2_EHI"]
        assert isinstance(ids, torch.Tensor) and isinstance(w2, torch.Tensor)
        (rows, k), (e, h, i) = ids.shape, w2.shape
        for arch in SHARED_MEMORY:
            tile = tiles.by_rule("moe_experts", {"rows": rows, "k": k, "e": e, "h": h, "i": i, "bits": 8}, arch)
            assert not tile["FEW"]
        counts = [int((ids == expert).sum()) for expert in range(-1, e)]
        assert counts[0] > 0 and counts[1:3] == [0, 0] and counts[-1] == rows


@pytest.mark.parametrize("name", SHAPES)
def test_hidden_rows_in_the_order_of_tiles_fit_what_is_planned_for_a_call(name: str) -> None:
    """Each expert's last tile may be nearly empty: the rows of all of them are held."""
    shape = {**SHAPES[name], "bits": 8}
    k, e, h, i = (shape[size] for size in "kehi")
    tiled = 0
    for rows in ROWS:
        for tile in tiles.candidates("moe_experts", {**shape, "rows": rows}, "sm_90"):
            fewest = rows // 2 + 1  # that run with a tile of so many
            places = fewest * k + min(fewest * k, e) * (tile["BM"] - 1)
            taken = places * (i + i // 128 * 4) + min(RETURNED_BYTES, fewest * k * h * OUT_BYTES) + fewest * h
            planned = workspace_bytes(fewest, k, h, 2 * i, e, kernels=True)
            assert not tile["TILED"] or taken <= planned, (rows, tile)
            tiled += tile["TILED"]
    assert tiled


@pytest.mark.parametrize("arch", SHARED_MEMORY)
def test_tiles_grow_with_the_rows_that_an_expert_gets(arch: str) -> None:
    shape = {**SHAPES["35B"], "bits": 8}
    sizes = [tiles.by_rule("moe_experts", {**shape, "rows": rows}, arch)["BM"] for rows in ROWS]
    assert sizes == sorted(sizes) and sizes[-1] == 128


def test_float32_has_tiles_of_16() -> None:
    tile = tiles.by_rule("moe_experts", {**SHAPES["35B"], "rows": 4096, "bits": 32}, "sm_90")
    assert tile["BM"] == 16 and not tile["UP_DESC"]
