"""The AITER providers of ops: when they may be chosen, and how their adapters are loaded.

The adapters are `ops/<op>/aiter.py`; they alone import AITER, when they are loaded. What each of them needs of the
installed package is in platform/aiter_abi.py, what it cannot do for any model is here.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from types import MappingProxyType, ModuleType

from rocm_serve.errors import UserError
from rocm_serve.ops.contract import PLAIN, Facts, OpFunction, Provider, WeightTensors
from rocm_serve.ops.facts import LinearShape
from rocm_serve.platform import aiter_abi
from rocm_serve.platform.table import archs_of

SHUFFLED = "aiter_16x16"  # tiles of 16 rows by 32 bytes or numbers, in the order that AITER's kernels read

_MAX_NORM_WIDTH = 8192
_MAX_HEAD_DIM = 256
_BLOCK = 128
_SHUFFLE_COLUMNS = 32


def aiter_provider(op: str, *, semantics: OpFunction | None = None) -> Provider:
    """Return the provider of `op` whose adapter is the function `op` of that op's aiter.py.

    `semantics`: what judges it where AITER means something else than the reference.
    """
    shuffles = op in ("fp8_linear", "moe_experts")
    return Provider(
        "aiter",
        load=lambda: _function(op),
        archs=archs_of(op, "aiter"),
        accepts=lambda facts: _LIMITS[op](facts) or aiter_abi.refusal(op),
        prepare_weights=(lambda weights: _prepare(op, weights)) if shuffles else None,
        layout=SHUFFLED if shuffles else PLAIN,
        semantics=semantics,
        packages=(aiter_abi.DISTRIBUTION, "triton"),
    )


def _adapter(op: str) -> ModuleType:
    folder = "rms_norm" if op == "add_rms_norm" else op
    try:
        return importlib.import_module(f"rocm_serve.ops.{folder}.aiter")
    except Exception as error:  # AITER fails to import with whatever its build, ROCm or a missing GPU raise
        raise UserError(
            f"--op {op}=aiter: AITER is installed and has what we call, but importing it fails:"
            f" {type(error).__name__}: {error}; --op {op}=triton does without it"
        ) from error


def _function(op: str) -> OpFunction:
    function: OpFunction = getattr(_adapter(op), op)
    return function


def _prepare(op: str, weights: WeightTensors) -> WeightTensors:
    prepared: WeightTensors = _adapter(op).prepare_weights(weights)
    return prepared


def _size(facts: Facts, name: str) -> int:
    """Return a size, 0 when the facts do not tell it: no limit below refuses 0."""
    size = facts.get(name, 0)
    assert isinstance(size, int), f"{name} is a size"
    return size


def _rows(facts: Facts) -> str | None:
    dtype = facts.get("dtype", "bfloat16")
    return None if dtype == "bfloat16" else f"takes rows in bfloat16, not {dtype}"


def _norm(facts: Facts) -> str | None:
    width = _size(facts, "hidden_size")
    if width > _MAX_NORM_WIDTH:
        return f"normalises rows of up to {_MAX_NORM_WIDTH} columns, not {width}"
    return _rows(facts)


def _quantised(facts: Facts) -> str | None:
    activation = facts.get("activation", "fp8_1x128")
    if activation != "fp8_1x128":
        return f"multiplies FP8 weights with rows quantised per 128 columns (fp8_1x128), not with {activation} rows"
    return _rows(facts)


def _fp8_linear(facts: Facts) -> str | None:
    linears = facts.get("linears", ())
    assert isinstance(linears, tuple)
    for shape in linears:
        assert isinstance(shape, LinearShape)
        if shape.fp8 and (shape.rows % _BLOCK or shape.columns % _BLOCK):
            return f"takes FP8 weights in whole blocks of {_BLOCK}, not [{shape.rows}, {shape.columns}]"
    return _quantised(facts)


def _moe_experts(facts: Facts) -> str | None:
    hidden, width = _size(facts, "hidden_size"), _size(facts, "expert_width")
    if facts.get("expert_fp8", True):
        if hidden % _BLOCK or width % _BLOCK:
            return f"takes FP8 experts in whole blocks of {_BLOCK}, not {hidden} x {width} on a rank"
        return _quantised(facts)
    if hidden % _SHUFFLE_COLUMNS or width % _SHUFFLE_COLUMNS:
        return f"takes experts whose widths are multiples of {_SHUFFLE_COLUMNS}, not {hidden} x {width} on a rank"
    return _rows(facts)


def _pages(facts: Facts) -> str | None:
    stored = facts.get("kv_dtype", "bfloat16")
    if stored not in ("bfloat16", "fp8_e4m3"):
        return f"keeps keys and values in bfloat16 or fp8_e4m3, not {stored}"
    return _rows(facts)


def _attention(facts: Facts) -> str | None:
    size = _size(facts, "head_dim")
    if size > _MAX_HEAD_DIM or size % 8:
        return f"takes heads of up to {_MAX_HEAD_DIM} in multiples of 8, not {size}"
    return _pages(facts)


def _attention_decode(facts: Facts) -> str | None:
    page = _size(facts, "page_size")
    if page & (page - 1):
        return f"takes pages of a power of two of rows, not {page}"
    return _attention(facts)


def _gdn(facts: Facts) -> str | None:
    key = _size(facts, "key_dim")
    if key > _MAX_HEAD_DIM:
        return f"takes key heads of up to {_MAX_HEAD_DIM}, not {key}"
    return _rows(facts)


_LIMITS: Mapping[str, Callable[[Facts], str | None]] = MappingProxyType(
    {
        "rms_norm": _norm,
        "add_rms_norm": _norm,
        "linear": _rows,
        "fp8_linear": _fp8_linear,
        "moe_experts": _moe_experts,
        "kv_write": _pages,
        "attention_prefill": _attention,
        "attention_decode": _attention_decode,
        "gdn_chunk": _gdn,
        "gdn_decode": _gdn,
    }
)
