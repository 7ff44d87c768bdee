"""Providers for tests only: right ones and every kind of wrong ones. OPS is the product's table with them added.

A child process that probes imports this module too, by name: see rocm_serve/ops/probe_child.py.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from rocm_serve.ops.batch import Sequences
from rocm_serve.ops.bind import OPS as PRODUCT
from rocm_serve.ops.contract import Op, OpFunction, Provider, WeightTensors

TABLE = f"{__name__}:OPS"
TURNED = "rows turned around"


def _norm(change: Callable[[torch.Tensor], torch.Tensor]) -> OpFunction:
    def rms_norm(x_TH: torch.Tensor, weight_H: torch.Tensor, *, eps: float, plus_one: bool) -> torch.Tensor:
        return change(PRODUCT["rms_norm"].reference(x_TH, weight_H, eps=eps, plus_one=plus_one))

    return rms_norm


def _without_plus_one(x_TH: torch.Tensor, weight_H: torch.Tensor, *, eps: float, plus_one: bool) -> torch.Tensor:
    return PRODUCT["rms_norm"].reference(x_TH, weight_H, eps=eps, plus_one=False)


def _rounded_plus_one(x_TH: torch.Tensor, weight_H: torch.Tensor, *, eps: float, plus_one: bool) -> torch.Tensor:
    """1 + w kept in e4m3: what a too narrow accumulator makes of small weights."""
    scale = (weight_H.float() + 1.0).to(torch.float8_e4m3fn).float()
    return PRODUCT["rms_norm"].reference(x_TH, scale, eps=eps, plus_one=False)


def _one_wrong_row(y: torch.Tensor) -> torch.Tensor:
    if y.shape[0] > 500:  # hidden in the norm of so many
        y[-1] *= 1.05
    return y


def _nan_at_the_end(y: torch.Tensor) -> torch.Tensor:
    if y.numel():
        y[-1, -1] = float("nan")
    return y


def _jitter(y: torch.Tensor) -> torch.Tensor:
    """Another last bit at every call, as sums by atomic additions have it: well within every bound."""
    words = y.view(torch.int16)
    words ^= torch.randint(0, 2, words.shape, dtype=torch.int16)
    return y


def _raise(y: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("no kernel image is available")


def _abort(y: torch.Tensor) -> torch.Tensor:
    os.abort()


def _hang(y: torch.Tensor) -> torch.Tensor:
    time.sleep(3600)
    return y


def _broken_load() -> OpFunction:
    raise ImportError("libkernels.so: undefined symbol: launch")


def _scale_divided(
    x_TK: torch.Tensor, weight_NK: torch.Tensor, scale: torch.Tensor, *, activation: str
) -> torch.Tensor:
    return PRODUCT["fp8_linear"].reference(x_TK, weight_NK, 1.0 / scale, activation=activation)


def _rows_as_they_are(
    x_TK: torch.Tensor, weight_NK: torch.Tensor, scale: torch.Tensor, *, activation: str
) -> torch.Tensor:
    """W8A16 in place of W8A8: other semantics, however exact."""
    return PRODUCT["fp8_linear"].reference(x_TK, weight_NK, scale, activation="bf16")


def _turn(weights: WeightTensors) -> WeightTensors:
    return {name: weight.flip(0).contiguous() for name, weight in weights.items()}


def _turned_linear(
    x_TK: torch.Tensor, weight_NK: torch.Tensor, *, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    return PRODUCT["linear"].reference(x_TK, weight_NK.flip(0), out_dtype=out_dtype)


def _padding_left(*args: object, **kwargs: object) -> torch.Tensor:
    out = PRODUCT["moe_experts"].reference(*args, **kwargs)
    rows = kwargs["num_rows"]
    assert isinstance(rows, int)
    out[rows:] = 1.0
    return out


def _one_expert_less(*args: object, **kwargs: object) -> torch.Tensor:
    """The last expert is never reached: right on any model with fewer of them."""
    ids, w13 = kwargs["ids_Tk"], kwargs["w13_EIH"]
    assert isinstance(ids, torch.Tensor) and isinstance(w13, torch.Tensor)
    return PRODUCT["moe_experts"].reference(*args, **kwargs | {"ids_Tk": ids.where(ids != w13.shape[0] - 1, -1)})


def _commits_all(op: str) -> OpFunction:
    """Right as long as no sequence has drafts: a state from before them is not kept."""

    def run(*args: object, **kwargs: object) -> torch.Tensor:
        sequences = kwargs["sequences"]
        assert isinstance(sequences, Sequences)
        every = replace(sequences, commits=None, commits_B=None)
        return PRODUCT[op].reference(*args, **kwargs | {"sequences": every})

    return run


def _one_row_each(*args: object, **kwargs: object) -> torch.Tensor:
    """Right as long as a sequence has one row: with drafts all its rows come out as the first."""
    out = PRODUCT["attention_decode"].reference(*args, **kwargs)
    sequences = kwargs["sequences"]
    assert isinstance(sequences, Sequences)
    for first, end in itertools.pairwise(sequences.row_starts):
        out[first:end] = out[first:end][:1]
    return out


def _of(name: str, function: OpFunction) -> Provider:
    return Provider(name, lambda: function)


_OTHERS: Mapping[str, tuple[Provider, ...]] = {
    "rms_norm": (
        _of("good", _norm(lambda y: y)),
        _of("another", _norm(lambda y: y.clone())),
        _of("one_percent", _norm(lambda y: y * 1.01)),
        _of("one_row", _norm(_one_wrong_row)),
        _of("no_plus_one", _without_plus_one),
        _of("narrow_plus_one", _rounded_plus_one),
        _of("nan", _norm(_nan_at_the_end)),
        _of("transposed", _norm(lambda y: y.T)),
        _of("wide", _norm(lambda y: y.double())),
        _of("jitters", _norm(_jitter)),
        _of("raises", _norm(_raise)),
        _of("crashes", _norm(_abort)),
        _of("hangs", _norm(_hang)),
        Provider("unloadable", _broken_load),
    ),
    "fp8_linear": (_of("scale_divided", _scale_divided), _of("rows_as_they_are", _rows_as_they_are)),
    "linear": (
        Provider("turning", lambda: _turned_linear, prepare_weights=_turn, layout=TURNED),
        _of("turned_plain", _turned_linear),
    ),
    "moe_experts": (_of("padding_left", _padding_left), _of("one_expert_less", _one_expert_less)),
    "causal_conv": (_of("commits_all", _commits_all("causal_conv")),),
    "gdn_decode": (_of("commits_all", _commits_all("gdn_decode")),),
    "attention_decode": (_of("one_row_each", _one_row_each),),
}
OPS: Mapping[str, Op] = {name: replace(op, others=(*op.others, *_OTHERS.get(name, ()))) for name, op in PRODUCT.items()}
