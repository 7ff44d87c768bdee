"""Trials of the Triton kernels of norms, gates, products and routing.

The executed ones are small and odd: tails of every mask, strided rows. Real sizes, those of the
2.4T model on one of eight ranks, are compiled only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType

import torch

from evals.gfx.registry import Arch, Outputs, Trial, fp8_dtype
from rocm_serve.ops import tiles
from rocm_serve.ops.add_norm_linear.cases import add_norm_linear_case
from rocm_serve.ops.contract import Arguments, OpFunction
from rocm_serve.ops.fp8 import BLOCK, fp8_max
from rocm_serve.ops.inputs import normal
from rocm_serve.ops.shared_down_add.cases import down_case
from rocm_serve.ops.shared_expert_add.cases import shared_case
from rocm_serve.ops.sigmoid_mul.cases import sigmoid_mul_heads_case

_BF16 = torch.bfloat16
Build = Callable[[torch.Generator, Arch], Arguments]


def _wide(x: torch.Tensor) -> torch.Tensor:
    """Return the same rows inside wider ones: 16-byte aligned, with a stride that is not their width."""
    width = x.shape[-1]
    held = torch.full((*x.shape[:-1], -(-(width + 9) // 16) * 16), float("nan"), dtype=x.dtype)
    held[..., 8 : 8 + width] = x
    return held[..., 8 : 8 + width]


def _block_fp8(g: torch.Generator, arch: Arch, *shape: int, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = fp8_dtype(arch)
    top = fp8_max(dtype)
    weight = (torch.randn(shape, generator=g) * (top / 4.5)).clamp(-top, top).to(dtype)
    blocks = (*shape[:-2], -(-shape[-2] // BLOCK), -(-shape[-1] // BLOCK))
    return weight, (torch.rand(blocks, generator=g) * 1.5 + 0.5) * (scale * 4.5 / top)


def _norm(g: torch.Generator, arch: Arch, *, shape: tuple[int, ...], residual: bool = False) -> Arguments:
    stream: Arguments = {"residual_TH": _wide(normal(g, *shape, dtype=_BF16))} if residual else {}
    weight = normal(g, shape[-1], scale=0.3, dtype=_BF16)
    return {"x_TH": _wide(normal(g, *shape, dtype=_BF16)), **stream, "weight_H": weight, "eps": 1e-2, "plus_one": True}


def _gated(g: torch.Generator, arch: Arch, *, shape: tuple[int, int, int], activation: str) -> Arguments:
    rows, heads, width = shape
    gate = _wide(normal(g, rows, heads * width, scale=3.0, dtype=_BF16)).view(shape)
    weight = normal(g, width, scale=0.3) + 1.0
    return {"x_THD": normal(g, *shape, dtype=_BF16), "gate_THD": gate, "weight_D": weight} | {
        "eps": 1e-2,
        "activation": activation,
    }


def _silu(g: torch.Generator, arch: Arch, *, rows: int, width: int) -> Arguments:
    return {"gate_up_TI": _wide(normal(g, rows, 2 * width, scale=3.0, dtype=_BF16))}


def _sigmoid(g: torch.Generator, arch: Arch, *, rows: int, width: int, gates: int) -> Arguments:
    return {
        "x_TH": _wide(normal(g, rows, width, dtype=_BF16)),
        "gate": _wide(normal(g, rows, gates, scale=3.0, dtype=_BF16)),
    }


def _sigmoid_heads(g: torch.Generator, arch: Arch, *, rows: int, heads: int, d: int) -> Arguments:
    return sigmoid_mul_heads_case(g, _BF16, t=rows, heads=heads, d=d)


def _shared(g: torch.Generator, arch: Arch, *, rows: int, width: int) -> Arguments:
    made = shared_case(g, _BF16, t=rows, h=width)
    return made | {name: _wide(made[name]) for name in ("routed_TH", "shared_TH", "x_TH")}


def _linear(
    g: torch.Generator, arch: Arch, *, rows: int, k: int, n: int, out: torch.dtype | None = torch.float32
) -> Arguments:
    weight = normal(g, n, k, scale=k**-0.5, dtype=_BF16)
    return {"x_TK": _wide(normal(g, rows, k, dtype=_BF16)), "weight_NK": weight, "out_dtype": out}


def _norm_in_product(g: torch.Generator, arch: Arch, *, rows: int, width: int, n: int) -> Arguments:
    made = add_norm_linear_case(g, _BF16, t=rows, h=width, n=n, eps=1e-2)
    return made | {name: _wide(made[name]) for name in ("x_TH", "residual_TH", "total_TH")}


def _down(g: torch.Generator, arch: Arch, *, rows: int, width: int, n: int) -> Arguments:
    """Return gate, up and what opens the expert as pieces of one product's rows."""
    made = down_case(g, _BF16, t=rows, i=width, h=n)
    return made | {name: _wide(made[name]) for name in ("routed_TH", "gate_up_TI", "gate_T1")}


def _real_norm_in_product(g: torch.Generator, arch: Arch, *, rows: int) -> Arguments:
    sizes = {"x_TH": (rows, 8192), "residual_TH": (rows, 8192), "norm_weight_H": (8192,), "weight_NH": (4640, 8192)}
    return _untouched(sizes | {"total_TH": (rows, 8192)}, arch, eps=1e-6, plus_one=True)


def _real_down(g: torch.Generator, arch: Arch, *, rows: int) -> Arguments:
    sizes = {"routed_TH": (rows, 8192), "gate_up_TI": (rows, 512), "gate_T1": (rows, 1), "weight_HI": (8192, 256)}
    return _untouched(sizes, arch)


def _fp8_linear(g: torch.Generator, arch: Arch, *, rows: int, k: int, n: int, activation: str) -> Arguments:
    weight, scale = _block_fp8(g, arch, n, k, scale=k**-0.5)
    x = _wide(normal(g, rows, k, dtype=_BF16))
    return {"x_TK": x, "weight_NK": weight, "scale": scale, "activation": activation}


def _quantise(g: torch.Generator, arch: Arch, *, rows: int, width: int) -> Arguments:
    return {"x_TK": _wide(normal(g, rows, width, dtype=_BF16)), "dtype": fp8_dtype(arch)}


def _route(g: torch.Generator, arch: Arch, *, rows: int, experts: int, top_k: int, ties: bool = False) -> Arguments:
    logits = torch.randint(0, 4, (rows, experts), generator=g) if ties else normal(g, rows, experts, scale=2.0)
    return {"logits_TE": logits.to(_BF16), "top_k": top_k, "renormalise": not ties}


def _untouched(sizes: Mapping[str, tuple[int, ...]], arch: Arch, **others: object) -> Arguments:
    """Arguments of a real size that are never read. A name's ending tells its dtype, bf16 without one."""
    made: Arguments = dict(others)
    for name, shape in sizes.items():
        plain, _, kind = name.partition("|")
        dtypes = {"": _BF16, "fp8": fp8_dtype(arch), "f32": torch.float32, "i32": torch.int32}
        made[plain] = torch.empty(shape, dtype=dtypes[kind])
    return made


def _real_fp8_linear(g: torch.Generator, arch: Arch, *, rows: int, activation: str) -> Arguments:
    sizes = {"x_TK": (rows, 8192), "weight_NK|fp8": (2560, 8192), "scale|f32": (20, 64)}
    return _untouched(sizes, arch, activation=activation)


def _real_linear(g: torch.Generator, arch: Arch, *, rows: int) -> Arguments:
    return _untouched({"x_TK": (rows, 8192), "weight_NK": (4096, 8192)}, arch, out_dtype=torch.float32)


_MATRIX = "stored as the matrix instruction leaves it, 4 columns of a row a lane"
_COLUMNS = "a program has few columns of one row to store"
_EXCEPTIONS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "moe_route_kernel": {"wide_stores": "an id and a weight for each of few choices"},
        "quantise_rows_kernel": {"wide_stores": "a lane that loads 16 bytes of bf16 has 8 bytes of FP8"},
        "shared_expert_add_kernel": {
            "wide_stores": "512 columns of one row are stored by all lanes that multiplied 2048"
        },
        "fp8_linear_kernel": {"wide_stores": _MATRIX},
        "fp8_rows_kernel": {"wide_stores": _MATRIX},
        "linear_kernel": {"wide_stores": _MATRIX},
        "one_row_kernel": {"wide_stores": _COLUMNS},
        "add_norm_linear_kernel": {"wide_stores": _COLUMNS},
        "few_shared_down_add_kernel": {"wide_stores": _COLUMNS},
        "shared_down_add_kernel": {
            "wide_stores": "stored as the matrix instruction leaves it: a row's columns 16 lanes apart"
        },
        "weight_left_kernel": {
            "wide_stores": "stored as the matrix instruction leaves it: a row's columns 16 lanes apart"
        },
    }
)
_ODD = "sizes that are no multiple of 16 bytes, to meet the tail of a mask"


def _trial(
    op: str, case: str, build: Build, *kernels: str, odd: bool = False, real: bool = False, fp8: bool = False
) -> Trial:
    """`odd` sizes are excused from wide accesses; `real` ones are compiled only; `fp8` products must be native."""
    exceptions = {f"{kernel}:{check}": why for kernel in kernels for check, why in _EXCEPTIONS.get(kernel, {}).items()}
    if odd:
        exceptions |= {"wide_loads": _ODD, "wide_stores": _ODD}
    products = tuple(k for k in kernels if k in ("fp8_linear_kernel", "fp8_rows_kernel")) if fp8 else ()
    return Trial(
        op=op,
        provider="triton",
        case=case,
        arguments=build,
        kernels=kernels,
        exceptions=exceptions,
        native_fp8=products,
        compile_only=real,
    )


def _few(case: str, tile: tiles.Tile, build: Build, *, real: bool = False) -> Trial:
    """A product of few rows, forced to a tile."""
    kernel = "weight_left_kernel" if tile["BM"] else "one_row_kernel"
    trial = _trial("linear", f"{case}, {'in parts' if tile['SPLITS'] > 1 else 'few'}", build, kernel, real=real)
    return replace(trial, call=partial(_forced, "linear", tile))


def _fp8_rows(case: str, tile: tiles.Tile, build: Build, *, real: bool = False) -> Trial:
    """A product of many quantised rows, forced to a tile."""
    kernels = ("quantise_rows_kernel", "fp8_rows_kernel")
    trial = _trial("fp8_linear", f"{case}, many", build, *kernels, fp8=True, real=real)
    return replace(trial, call=partial(_forced, "fp8_linear", tile))


def _forced(kernel: str, tile: tiles.Tile, function: OpFunction, arguments: Arguments) -> Outputs:
    with tiles.forced(kernel, tile):
        return (function(**arguments),)


def _tile(rows: int, columns: int, k: int, splits: int) -> tiles.Tile:
    sizes = {"BM": rows, "BN": columns, "BK": k, "SPLITS": splits}
    return {"FEW": 1, **sizes, "AHEAD": 0, "num_warps": 4 if rows == 0 else 2, "num_stages": 1 if rows == 0 else 2}


def _many(rows: int, columns: int, parts: int, **changes: int) -> tiles.Tile:
    """Return a tile of fp8_linear/triton_rows.py."""
    tile = {"MANY": 1, "BM": rows, "BN": columns, "BK": 128, "PARTS": parts, "GROUP": 2, "PROGRAMS": 0}
    return tile | {"DESC": 0, "REGS": 0, "num_warps": 4, "num_stages": 2} | changes


def _fp8_trial(case: str, activation: str, build: Build, **other: bool) -> Trial:
    quantised = activation == "fp8_1x128"
    kernels = (*(("quantise_rows_kernel",) if quantised else ()), "fp8_linear_kernel")
    return _trial("fp8_linear", f"{case}, {activation}", build, *kernels, fp8=quantised, **other)


_NORM, _GATED, _SIGMOID = "rms_norm_kernel", "gated_rms_norm_kernel", "sigmoid_mul_kernel"
_ACTIVATIONS = ("bf16", "fp8_1x128")

TRIALS: tuple[Trial, ...] = (
    _trial("rms_norm", "9 x 259", partial(_norm, shape=(9, 259)), _NORM, odd=True),
    _trial("rms_norm", "3 x 3 x 64", partial(_norm, shape=(3, 3, 64)), _NORM),
    _trial("rms_norm", "2 x 5376", partial(_norm, shape=(2, 5376)), _NORM),
    _trial("add_rms_norm", "3 x 520", partial(_norm, shape=(3, 520), residual=True), _NORM),
    _trial("add_rms_norm", "3 x 8192", partial(_norm, shape=(3, 8192), residual=True), _NORM, real=True),
    _trial("rms_norm", "3 x 8192", partial(_norm, shape=(3, 8192)), _NORM, real=True),
    _trial(
        "gated_rms_norm",
        "silu, 5 x 3 x 40",
        partial(_gated, shape=(5, 3, 40), activation="silu"),
        _GATED,
    ),
    _trial(
        "gated_rms_norm",
        "sigmoid, 3 x 3 x 128",
        partial(_gated, shape=(3, 3, 128), activation="sigmoid"),
        _GATED,
    ),
    _trial("silu_mul", "5 x 72", partial(_silu, rows=5, width=72), "silu_mul_kernel"),
    _trial("silu_mul", "3 x 51", partial(_silu, rows=3, width=51), "silu_mul_kernel", odd=True),
    _trial("silu_mul", "3 x 2048", partial(_silu, rows=3, width=2048), "silu_mul_kernel", real=True),
    _trial("sigmoid_mul", "5 x 72", partial(_sigmoid, rows=5, width=72, gates=72), _SIGMOID),
    _trial("sigmoid_mul", "gates beside heads", partial(_sigmoid_heads, rows=3, heads=3, d=256), _SIGMOID),
    _trial(
        "sigmoid_mul", "5 x 2056, a gate a row", partial(_sigmoid, rows=5, width=2056, gates=1), "sigmoid_mul_kernel"
    ),
    _trial("shared_expert_add", "3 x 520", partial(_shared, rows=3, width=520), "shared_expert_add_kernel"),
    _trial("shared_expert_add", "3 x 51", partial(_shared, rows=3, width=51), "shared_expert_add_kernel", odd=True),
    _trial(
        "shared_expert_add", "3 x 8192", partial(_shared, rows=3, width=8192), "shared_expert_add_kernel", real=True
    ),
    _trial("linear", "5 x 80 x 136", partial(_linear, rows=5, k=80, n=136), "linear_kernel"),
    _trial("linear", "67 x 80 x 40", partial(_linear, rows=67, k=80, n=40), "linear_kernel"),
    _trial("linear", "19 x 520 x 72, bf16", partial(_linear, rows=19, k=520, n=72, out=None), "linear_kernel"),
    *(
        _trial("linear", f"{t} x 8192 x 4096", partial(_real_linear, rows=t), "linear_kernel", real=True)
        for t in (1, 33, 300)
    ),
    _few("2 x 528 x 20", _tile(0, 8, 512, 1), partial(_linear, rows=2, k=528, n=20)),
    _few("5 x 80 x 136", _tile(16, 32, 64, 1), partial(_linear, rows=5, k=80, n=136)),
    _few("19 x 264 x 40", _tile(16, 32, 64, 3), partial(_linear, rows=19, k=264, n=40, out=None)),
    _few("1 x 8192 x 4096", _tile(0, 2, 2048, 1), partial(_real_linear, rows=1), real=True),
    _few("16 x 8192 x 4096", _tile(16, 32, 128, 1), partial(_real_linear, rows=16), real=True),
    _few("16 x 8192 x 4096", _tile(16, 32, 128, 2), partial(_real_linear, rows=16), real=True),
    _trial(
        "add_norm_linear", "3 x 520 x 20", partial(_norm_in_product, rows=3, width=520, n=20), "add_norm_linear_kernel"
    ),
    _trial(
        "add_norm_linear",
        "1 x 51 x 37",
        partial(_norm_in_product, rows=1, width=51, n=37),
        "add_norm_linear_kernel",
        odd=True,
    ),
    _trial("shared_down_add", "3 x 264 x 40", partial(_down, rows=3, width=264, n=40), "few_shared_down_add_kernel"),
    _trial("shared_down_add", "19 x 136 x 40", partial(_down, rows=19, width=136, n=40), "shared_down_add_kernel"),
    *(
        _trial(
            "add_norm_linear",
            f"{t} x 8192 x 4640",
            partial(_real_norm_in_product, rows=t),
            "add_norm_linear_kernel",
            real=True,
        )
        for t in (1, 4)
    ),
    *(
        _trial("shared_down_add", f"{t} x 256 x 8192", partial(_real_down, rows=t), kernel, real=True)
        for kernel, counts in (("few_shared_down_add_kernel", (1, 4)), ("shared_down_add_kernel", (16, 64)))
        for t in counts
    ),
    *(
        _fp8_trial(f"{t} x {k} x {n}", a, partial(_fp8_linear, rows=t, k=k, n=n, activation=a))
        for a in _ACTIVATIONS
        for t, k, n in ((5, 208, 136), (19, 256, 40), (67, 144, 72))
    ),
    *(
        _fp8_trial(f"{t} x 8192 x 2560", a, partial(_real_fp8_linear, rows=t, activation=a), real=True)
        for a in _ACTIVATIONS
        for t in (1, 20, 60, 300)
    ),
    _fp8_rows(
        "37 x 256 x 144",
        _many(16, 64, 2, PROGRAMS=3, REGS=1),
        partial(_fp8_linear, rows=37, k=256, n=144, activation="fp8_1x128"),
    ),
    _fp8_rows("19 x 208 x 256", _many(16, 64, 4), partial(_fp8_linear, rows=19, k=208, n=256, activation="fp8_1x128")),
    _fp8_rows(
        "300 x 8192 x 2560",
        _many(128, 128, 1, GROUP=8, num_warps=8),
        partial(_real_fp8_linear, rows=300, activation="fp8_1x128"),
        real=True,
    ),
    _trial("quantise_rows", "5 x 304", partial(_quantise, rows=5, width=304), "quantise_rows_kernel"),
    _trial("moe_route", "3 x 27", partial(_route, rows=3, experts=27, top_k=5), "moe_route_kernel", odd=True),
    _trial("moe_route", "2 x 512, ties", partial(_route, rows=2, experts=512, top_k=10, ties=True), "moe_route_kernel"),
)
