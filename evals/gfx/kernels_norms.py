"""Trials of the norms by kernels_hip: each kernel at the edges of its widths, strided rows, odd row counts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from evals.gfx.hip_device import library_of
from evals.gfx.registry import Arch, Outputs, Trial, fp8_dtype
from rocm_serve.ops.contract import Arguments, OpFunction
from rocm_serve.ops.fp8 import quantise_rows
from rocm_serve.ops.gated_rms_norm import hip as gated_hip
from rocm_serve.ops.inputs import normal
from rocm_serve.ops.qk_norm_rope import hip as qk_hip
from rocm_serve.ops.rms_norm import hip as rms_hip
from rocm_serve.ops.rms_norm.reference import rms_norm

BF16 = torch.bfloat16


def _rows(g: torch.Generator, arch: Arch, *, shape: tuple[int, ...], residual: bool = False, **more: Any) -> Arguments:
    """Rows cut out of wider ones, so that their stride is not their width."""
    scale = more.pop("scale", 1.0)
    x = normal(g, *shape[:-1], shape[-1] + 8, scale=scale, dtype=BF16)[..., : shape[-1]]
    stream: Arguments = {"residual_TH": normal(g, *shape, scale=scale, dtype=BF16)} if residual else {}
    weight = normal(g, shape[-1], scale=0.3, dtype=BF16)
    return {"x_TH": x, **stream, "weight_H": weight, "eps": 1e-6, "plus_one": True, **more}


def _normed(x: Any, weight: Any, eps: Any, plus_one: Any) -> torch.Tensor:
    x, scale = x.double(), weight.double() + (1 if plus_one else 0)
    exact: torch.Tensor = x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * scale
    return exact


def _exact_norm(a: Arguments) -> Outputs:
    return (_normed(a["x_TH"], a["weight_H"], a["eps"], a["plus_one"]),)


def _exact_add(a: Arguments) -> Outputs:
    x, residual = a["x_TH"], a["residual_TH"]
    assert isinstance(x, torch.Tensor) and isinstance(residual, torch.Tensor)
    total = (x.double() + residual.double()).to(BF16)
    return _normed(total, a["weight_H"], a["eps"], a["plus_one"]), total.double()


def _norm(kernel: str, *shape: int, residual: bool = False, case: str = "", **more: Any) -> Trial:
    op = "add_rms_norm" if residual else "rms_norm"
    return Trial(
        op=op,
        provider="hip",
        case=case or " x ".join(map(str, shape)),
        arguments=partial(_rows, shape=shape, residual=residual, **more),
        kernels=(kernel,),
        limit=2e-3,
        function=lambda device: getattr(rms_hip, f"make_{op}")(library_of(device)),
        exact=_exact_add if residual else _exact_norm,
    )


def _quantised_call(function: OpFunction, a: Arguments) -> Outputs:
    """Return the norm, and how far values and scales are from quantising it."""
    a = dict(a)
    dtype = a.pop("dtype")
    assert isinstance(dtype, torch.dtype)
    values, scales, y = function(**a, dtype=dtype, with_norm=True)
    wanted, factors = quantise_rows(y, dtype)
    return y, values.float() - wanted.float(), scales - factors


def _quantised_expected(a: Arguments) -> Outputs:
    a = {k: v for k, v in a.items() if k != "dtype"}
    y = rms_norm(**a)  # type: ignore[arg-type]
    return y, torch.zeros(y.shape), torch.zeros(y.shape[0], -(-y.shape[1] // 128))


def _exact_quantised(a: Arguments) -> Outputs:
    (y,) = _exact_norm(a)
    return y, torch.zeros(y.shape), torch.zeros(y.shape[0], -(-y.shape[1] // 128))


def _quantised(kernel: str, *shape: int, **more: Any) -> Trial:
    def arguments(g: torch.Generator, arch: Arch) -> Arguments:
        return {**_rows(g, arch, shape=shape, **more), "dtype": fp8_dtype(arch)}

    return Trial(
        op="rms_norm_fp8",
        provider="hip",
        case=" x ".join(map(str, shape)) + (" zeros" if more else ""),
        arguments=arguments,
        kernels=(kernel,),
        limit=2e-3,
        function=lambda device: partial(rms_hip.rms_norm_fp8, library_of(device)),
        call=_quantised_call,
        expected=_quantised_expected,
        exact=_exact_quantised,
    )


def _gated_rows(g: torch.Generator, arch: Arch, *, shape: tuple[int, ...], activation: str, dtype: Any) -> Arguments:
    tokens, heads, width = shape
    return {
        "x_THD": normal(g, *shape, dtype=BF16),
        "gate_THD": normal(g, tokens, heads + 1, width, scale=3.0, dtype=BF16)[:, :heads],
        "weight_D": (normal(g, width) * 0.3 + 1).to(dtype),
        "eps": 1e-6,
        "activation": activation,
    }


def _exact_gated(a: Arguments) -> Outputs:
    gate, activation = a["gate_THD"], a["activation"]
    assert isinstance(gate, torch.Tensor)
    factor = torch.sigmoid(gate.double()) * (gate.double() if activation == "silu" else 1)
    return (_normed(a["x_THD"], a["weight_D"], a["eps"], False) * factor,)


def _gated(kernel: str, *shape: int, activation: str = "silu", dtype: torch.dtype = BF16) -> Trial:
    return Trial(
        op="gated_rms_norm",
        provider="hip",
        case=f"{' x '.join(map(str, shape))} {activation}",
        arguments=partial(_gated_rows, shape=shape, activation=activation, dtype=dtype),
        kernels=(kernel,),
        limit=2e-3,
        function=lambda device: gated_hip.make_gated_rms_norm(library_of(device)),
        exact=_exact_gated,
    )


def _heads(g: torch.Generator, arch: Arch, *, shape: Mapping[str, int]) -> Arguments:
    tokens, heads, keys, width, turned = (shape[name] for name in ("tokens", "heads", "keys", "width", "turned"))
    angle = torch.rand(50, turned // 2, generator=g) * 6.3
    return {
        "q_THD": normal(g, tokens, heads, 2 * width, dtype=BF16)[..., :width],
        "k_TGD": normal(g, tokens, keys, width, dtype=BF16),
        "q_weight_D": normal(g, width, scale=0.3, dtype=BF16),
        "k_weight_D": normal(g, width, scale=0.3, dtype=BF16),
        "cos_PR": angle.cos(),
        "sin_PR": angle.sin(),
        "positions_T": torch.randint(0, 50, (tokens,), generator=g),
        "eps": 1e-6,
    }


def _exact_heads(a: Arguments) -> Outputs:
    cos, sin, positions = a["cos_PR"], a["sin_PR"], a["positions_T"]
    assert isinstance(cos, torch.Tensor) and isinstance(sin, torch.Tensor)
    half = cos.shape[1]
    turned = []
    for x, weight in (("q_THD", "q_weight_D"), ("k_TGD", "k_weight_D")):
        y = _normed(a[x], a[weight], a["eps"], True)
        first, second, rest = y[..., :half], y[..., half : 2 * half], y[..., 2 * half :]
        c, s = (table.double()[positions][:, None] for table in (cos, sin))
        turned.append(torch.cat((first * c - second * s, second * c + first * s, rest), -1))
    return turned[0], turned[1]


def _rotated(**shape: int) -> Trial:
    return Trial(
        op="qk_norm_rope",
        provider="hip",
        case=" ".join(f"{name} {size}" for name, size in shape.items()),
        arguments=partial(_heads, shape=shape),
        kernels=("qk_norm_rope_256",),
        limit=2e-3,
        function=lambda device: qk_hip.make_qk_norm_rope(library_of(device)),
        # A difference of two products may cancel: the noise is that of the products then, not of their difference.
        exact=_exact_heads if shape["turned"] == 0 else None,
    )


TRIALS: tuple[Trial, ...] = (
    _norm("rms_norm_128", 37, 128),
    _norm("rms_norm_128", 3, 8),
    _norm("rms_norm_512", 9, 136),
    _norm("rms_norm_512", 3, 5, 256),
    _norm("rms_norm_512", 5, 512, plus_one=False, case="plain weight"),
    _norm("rms_norm_2048", 3, 520),
    _norm("rms_norm_2048", 2, 2048),
    _norm("rms_norm_4096", 2, 2056),
    _norm("rms_norm_4096", 2, 4096),
    _norm("rms_norm_8192", 2, 5376, scale=1e-3, case="eps matters"),
    _norm("rms_norm_8192", 2, 8192),
    _norm("rms_norm_16384", 1, 8200),
    _norm("rms_norm_16384", 2, 16384),
    _norm("add_rms_norm_512", 9, 264, residual=True),
    _norm("add_rms_norm_2048", 3, 2048, residual=True),
    _norm("add_rms_norm_4096", 2, 3080, residual=True),
    _norm("add_rms_norm_8192", 3, 8192, residual=True),
    _norm("add_rms_norm_8192", 2, 4104, residual=True, scale=1e4, case="large values"),
    _norm("add_rms_norm_16384", 1, 16384, residual=True),
    _quantised("rms_norm_fp8_512", 5, 392),
    _quantised("rms_norm_fp8_512", 3, 256, scale=0.0),
    _quantised("rms_norm_fp8_2048", 2, 1160),
    _quantised("rms_norm_fp8_4096", 2, 4096),
    _quantised("rms_norm_fp8_8192", 2, 8192),
    _quantised("rms_norm_fp8_16384", 1, 8328),
    _gated("gated_rms_norm_128", 5, 3, 128),
    _gated("gated_rms_norm_128", 3, 5, 40, activation="sigmoid"),
    _gated("gated_rms_norm_128", 7, 1, 64, dtype=torch.float32),
    _gated("gated_rms_norm_512", 3, 3, 256, dtype=torch.float32),
    _gated("gated_rms_norm_512", 2, 1, 504),
    _rotated(tokens=5, heads=8, keys=2, width=256, turned=64),
    _rotated(tokens=3, heads=3, keys=1, width=64, turned=64),
    _rotated(tokens=9, heads=2, keys=1, width=136, turned=0),
)
