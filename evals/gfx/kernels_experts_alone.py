"""Trials of the routed experts of rows that are alone, by matrix instructions; see kernels_experts.py."""

from __future__ import annotations

from functools import partial

import torch

from evals.gfx.kernels_experts import Build, _experts, _forced, _real
from evals.gfx.registry import Trial
from rocm_serve.ops import tiles

_KERNELS = ("blocks_gate_up_kernel", "blocks_down_kernel")


def _tile(up: int, down: int, made: int = 0) -> tiles.Tile:
    tile = {"FEW": 1, "ALONE": 2, "MADE": made, "UP_STAGES": 2}
    for part, rows in (("UP", up), ("DOWN", down)):
        tile |= {f"{part}_BN": rows, f"{part}_WARPS": 4, f"{part}_COLUMNS": 16, f"{part}_BITS": 8, f"{part}_EARLY": 0}
    return tile


def _trial(case: str, tile: tiles.Tile, activation: str | None, build: Build, *, real: bool = False) -> Trial:
    quantised = activation == "fp8_1x128"
    exceptions = {f"{kernel}:wide_stores": "a program has 4 to 16 columns of one row to store" for kernel in _KERNELS}
    first = ("quantise_rows_kernel",) if quantised and tile["MADE"] else ()
    exceptions |= {f"{kernel}:wide_stores": "a lane that loads 16 bytes has 4 of FP8" for kernel in first}
    return Trial(
        op="moe_experts",
        provider="triton",
        case=f"{case}, {activation or 'plain'}",
        arguments=build,
        kernels=(*_KERNELS[:1], *first, *_KERNELS[1:]),
        exceptions=exceptions,
        native_fp8=_KERNELS if quantised else (),
        compile_only=real,
        call=partial(_forced, tile),
    )


_FP8 = partial(_experts, rows=2, h=256, i=128, e=4, k=3, activation="fp8_1x128")

TRIALS: tuple[Trial, ...] = (
    _trial(
        "by blocks, a count on the device",
        _tile(8, 16),
        None,
        partial(_experts, rows=3, h=72, i=40, e=4, k=3, live=torch.tensor([2], dtype=torch.int32)),
    ),
    _trial("by blocks, width 128", _tile(16, 8), "fp8_1x128", _FP8),
    _trial("by blocks, quantised before down", _tile(4, 8, 1), "fp8_1x128", partial(_FP8, rows=1, k=2)),
    _trial("2.4T, by blocks", _tile(8, 8, 1), "fp8_1x128", partial(_real, rows=1, activation="fp8_1x128"), real=True),
)
