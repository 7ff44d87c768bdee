"""Trials of the Triton kernels of the routed experts: for many rows, and for few in each of the ways that a tile names.

The executed ones are small and odd, and forced to a tile. Real sizes, those of the 2.4T model on one of eight ranks,
are compiled only, with the tile that the rule gives them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType

import torch

from evals.gfx.judge import outputs_of
from evals.gfx.kernels_products import _block_fp8 as block_fp8
from evals.gfx.kernels_products import _untouched as untouched
from evals.gfx.kernels_products import _wide as wide
from evals.gfx.registry import Arch, Outputs, Trial
from rocm_serve.ops import tiles
from rocm_serve.ops.contract import Arguments, OpFunction
from rocm_serve.ops.inputs import normal

_BF16 = torch.bfloat16
Build = Callable[[torch.Generator, Arch], Arguments]


def _few(*, direct: int, fused: int, splits: int, up: int = 128, down: int = 128, unroll: int = 1) -> tiles.Tile:
    tile = {"FEW": 1, "BM": 16, "DIRECT": direct, "FUSED": fused, "PDL": 0, "UP_SPLITS": splits}
    for part, rows in (("UP", up), ("DOWN", down)):
        tile |= {f"{part}_BN": rows, f"{part}_WARPS": 4, f"{part}_STAGES": 2, f"{part}_UNROLL": unroll}
    return tile


def _many(bm: int, short: int = 0, **changes: int) -> tiles.Tile:
    """Return a tile of triton_grouped.py."""
    tile = {"FEW": 0, "BM": bm, "TILED": 0, "DOWN_HELD": 0, "DOWN_RUN": 1, "DOWN_PROGRAMS": 0}
    for part in ("UP", "DOWN"):
        tile |= {f"{part}_WARPS": 4, f"{part}_STAGES": 2, f"{part}_DESC": 0, f"{part}_SHORT": short}
        tile |= {f"{part}_HALVES": 0, f"{part}_REGS": 0}
    return tile | changes


def _experts(
    g: torch.Generator,
    arch: Arch,
    *,
    rows: int,
    h: int,
    i: int,
    e: int,
    k: int,
    activation: str | None = None,
    live: int | torch.Tensor | None = None,
) -> Arguments:
    """Without an activation the weights are plain. A fifth of the choices is held elsewhere."""
    ids = torch.stack([torch.randperm(e, generator=g)[:k] for _ in range(rows)]).to(torch.int32)
    ids[torch.rand(ids.shape, generator=g) < 0.2] = -1
    made: Arguments = {
        "x_TH": wide(normal(g, rows, h, dtype=_BF16)),
        "ids_Tk": ids,
        "weights_Tk": torch.rand(rows, k, generator=g),
        "num_rows": rows if live is None else live,
        "activation": activation or "bf16",
    }
    if activation is None:
        w13 = normal(g, e, 2 * i, h, scale=h**-0.5, dtype=_BF16)
        return made | {"w13_EIH": w13, "w2_EHI": normal(g, e, h, i, scale=i**-0.5, dtype=_BF16)}
    (w13, s13), (w2, s2) = (
        block_fp8(g, arch, e, 2 * i, h, scale=h**-0.5),
        block_fp8(g, arch, e, h, i, scale=i**-0.5),
    )
    return made | {"w13_EIH": w13, "w13_scale": s13, "w2_EHI": w2, "w2_scale": s2}


def _real(g: torch.Generator, arch: Arch, *, rows: int, activation: str | None) -> Arguments:
    """32 experts of 512: a tile is chosen by the rows that an expert gets."""
    fp8, scales = ("|fp8", {"w13_scale|f32": (32, 4, 64), "w2_scale|f32": (32, 64, 2)}) if activation else ("", {})
    sizes = {"x_TH": (rows, 8192), "ids_Tk|i32": (rows, 10), "weights_Tk|f32": (rows, 10)} | scales
    sizes |= {f"w13_EIH{fp8}": (32, 512, 8192), f"w2_EHI{fp8}": (32, 8192, 256)}
    return untouched(sizes, arch, num_rows=rows, activation=activation or "bf16")


def _forced(tile: tiles.Tile, function: OpFunction, arguments: Arguments) -> Outputs:
    with tiles.forced("moe_experts", tile):
        return outputs_of("moe_experts", function(**arguments), arguments)


_WORDS = "ids are sorted one word at a time"
_MATRIX = "stored as the matrix instruction leaves it, 4 columns of a row a lane"
_TURNED = "stored as the matrix instruction leaves it: 16 lanes side by side, 4 bytes each"
_BLOCKS = "blocks of 128 columns of 4 rows, shared by all lanes: 8 bytes of float32 for each"
_PLACED = "words of ids and places; a lane that loads 16 bytes of bf16 has 8 bytes of FP8"
_EXCEPTIONS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "count_choices_kernel": {"wide_loads": _WORDS, "wide_stores": _WORDS},
        "add_up_counts_kernel": {"wide_loads": _WORDS, "wide_stores": _WORDS},
        "place_choices_kernel": {"wide_loads": _WORDS, "wide_stores": _WORDS},
        "place_few_kernel": {"wide_loads": _WORDS, "wide_stores": _PLACED},
        "quantise_rows_kernel": {"wide_stores": "a lane that loads 16 bytes of bf16 has 8 bytes of FP8"},
        "gate_up_kernel": {"wide_stores": _MATRIX},
        "down_kernel": {"wide_stores": _MATRIX},
        "down_in_turn_kernel": {"wide_stores": _MATRIX},
        "few_gate_up_kernel": {
            "wide_stores": "16 rows of 128 columns are shared by all lanes: 8 bytes of FP8 for each"
        },
        "few_partial_kernel": {"wide_stores": _TURNED},
        "few_activate_kernel": {"wide_loads": _BLOCKS, "wide_stores": _BLOCKS},
        "few_down_kernel": {"wide_stores": _TURNED},
        "few_combine_kernel": {"wide_stores": "a lane that loads 16 bytes of float32 has 8 bytes of bf16"},
        "few_down_combine_kernel": {"wide_stores": "a program has 64 columns of one row to store"},
        "alone_gate_up_kernel": {
            "wide_loads": "128 columns of 8 rows are shared by all lanes: 4 bytes of FP8, 8 of bf16 for each",
            "wide_stores": "a program has 8 columns of one row to store",
        },
        "alone_down_kernel": {"wide_stores": "a program has 8 columns of one row to store"},
    }
)


def _kernels(tile: tiles.Tile, *, quantised: bool) -> tuple[str, ...]:
    if not tile["FEW"]:
        several = (
            "count_choices_kernel",
            "add_up_counts_kernel",
            "place_choices_kernel",
            "gate_up_kernel",
            "down_in_turn_kernel" if tile["DOWN_PROGRAMS"] else "down_kernel",
            "combine_kernel",
        )
        return (*(("quantise_rows_kernel",) if quantised else ()), *several)
    if "ALONE" in tile:
        return "alone_gate_up_kernel", "few_activate_kernel", "alone_down_kernel"
    first = ("quantise_rows_kernel",) if tile["DIRECT"] and quantised else ()
    first = first if tile["DIRECT"] else ("place_few_kernel",)
    up = ("few_partial_kernel", "few_activate_kernel") if tile["UP_SPLITS"] else ("few_gate_up_kernel",)
    down = ("few_down_combine_kernel",) if tile["FUSED"] else ("few_down_kernel", "few_combine_kernel")
    return (*first, *up, *down)


_PRODUCTS = ("gate_up_kernel", "down_kernel", "down_in_turn_kernel") + (
    *("few_gate_up_kernel", "few_partial_kernel", "few_down_kernel"),
)


def _trial(case: str, tile: tiles.Tile, activation: str | None, build: Build, *, real: bool = False) -> Trial:
    quantised = activation == "fp8_1x128"
    kernels = _kernels(tile, quantised=quantised)
    return Trial(
        op="moe_experts",
        provider="triton",
        case=f"{case}, {activation or 'plain'}",
        arguments=build,
        kernels=kernels,
        exceptions={
            f"{kernel}:{check}": why for kernel in kernels for check, why in _EXCEPTIONS.get(kernel, {}).items()
        },
        native_fp8=tuple(k for k in kernels if k in (*_PRODUCTS, "few_down_combine_kernel")) if quantised else (),
        compile_only=real,
        call=None if real else partial(_forced, tile),
    )


def _by_rule(rows: int, activation: str | None) -> Trial:
    shape = {"rows": rows, "k": 10, "e": 32, "h": 8192, "i": 256, "bits": 8 if activation == "fp8_1x128" else 16}
    build = partial(_real, rows=rows, activation=activation)
    return _trial(f"2.4T, {rows} rows", tiles.by_rule("moe_experts", shape, "gfx942"), activation, build, real=True)


def _compiled(case: str, tile: tiles.Tile) -> Trial:
    """Compile a tile that no rule gives on this card, at a real size."""
    build = partial(_real, rows=1, activation="fp8_1x128")
    return replace(_trial(case, tile, "fp8_1x128", build, real=True), native_fp8=(), call=partial(_forced, tile))


_ACTIVATIONS = ("bf16", "fp8_1x128")
_IN_ORDER = _few(direct=0, fused=0, splits=0)
_PARTS = _few(direct=1, fused=0, splits=2, up=64, down=64, unroll=2)
_ALONE = _few(direct=1, fused=1, splits=0, down=64)
_ROWS_ALONE = {"FEW": 1, "ALONE": 1, "UP_BN": 8, "UP_WARPS": 4, "UP_STAGES": 2, "DOWN_BN": 8, "DOWN_WARPS": 4}

TRIALS: tuple[Trial, ...] = (
    _trial("7 rows, 5 live", _many(16), None, partial(_experts, rows=7, h=72, i=40, e=3, k=2, live=5)),
    *(
        _trial(
            "width 192",
            _many(16, UP_HALVES=1, DOWN_RUN=2),
            a,
            partial(_experts, rows=5, h=160, i=192, e=3, k=2, activation=a),
        )
        for a in _ACTIVATIONS
    ),
    *(
        _trial(
            "tiles of 64",
            _many(64, short=1, DOWN_HELD=1),
            a,
            partial(_experts, rows=50, h=128, i=128, e=2, k=2, activation=a),
        )
        for a in _ACTIVATIONS
    ),
    _trial(
        "in turn, width 192",
        _many(16, TILED=1, DOWN_PROGRAMS=3, DOWN_HALVES=1),
        "fp8_1x128",
        partial(_experts, rows=5, h=160, i=192, e=3, k=2, activation="fp8_1x128"),
    ),
    _trial(
        "in the order of tiles",
        _many(32, short=1, TILED=1, DOWN_HELD=1, DOWN_HALVES=1, UP_REGS=1, DOWN_REGS=1),
        "fp8_1x128",
        partial(_experts, rows=20, h=128, i=128, e=2, k=2, activation="fp8_1x128"),
    ),
    _trial(
        "a count on the device",
        _many(16),
        None,
        partial(_experts, rows=6, h=64, i=32, e=4, k=2, live=torch.tensor([4], dtype=torch.int32)),
    ),
    _trial("few in order, 5 live", _IN_ORDER, None, partial(_experts, rows=7, h=72, i=40, e=3, k=2, live=5)),
    *(
        _trial("few in order, width 192", _IN_ORDER, a, partial(_experts, rows=5, h=160, i=192, e=3, k=2, activation=a))
        for a in _ACTIVATIONS
    ),
    _trial("few in parts, 4 live", _PARTS, None, partial(_experts, rows=5, h=136, i=72, e=3, k=2, live=4)),
    _trial(
        "few in parts, width 192",
        _PARTS,
        "fp8_1x128",
        partial(_experts, rows=3, h=400, i=192, e=3, k=2, activation="fp8_1x128"),
    ),
    _trial(
        "few alone, a count on the device",
        _ALONE,
        None,
        partial(_experts, rows=3, h=72, i=40, e=4, k=3, live=torch.tensor([2], dtype=torch.int32)),
    ),
    _trial(
        "few alone, width 128",
        _ALONE,
        "fp8_1x128",
        partial(_experts, rows=2, h=256, i=128, e=4, k=3, activation="fp8_1x128"),
    ),
    _trial(
        "in three launches, a count on the device",
        _ROWS_ALONE | {"UP_BK": 128},
        None,
        partial(_experts, rows=3, h=72, i=40, e=4, k=3, live=torch.tensor([2], dtype=torch.int32)),
    ),
    *(
        _trial(
            "in three launches, width 128",
            _ROWS_ALONE | {"UP_BK": 128},
            a,
            partial(_experts, rows=2, h=256, i=128, e=4, k=3, activation=a),
        )
        for a in _ACTIVATIONS
    ),
    _compiled("2.4T, in three launches", _ROWS_ALONE | {"UP_BK": 1024}),
    *(_by_rule(rows, a) for a in (None, *_ACTIVATIONS) for rows in (1, 60, 180, 500)),
)
