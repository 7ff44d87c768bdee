"""Which provider of an op is tried first, by architecture. Pure data; the first one that accepts is bound.

Architectures are the probe's names: "cpu" (of any make), "gfx942", "gfx950", "sm_90". "gfx*" and "sm_*" stand for the
rest of a family, "*" for everything else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fnmatch import fnmatch
from types import MappingProxyType
from typing import Literal

REFERENCE_ONLY = ("reference",)
# Bound where they are wished for alone, else layers run their parts: no step gained by them on an H200, and no other
# GPU ran them (docs/performance.md).
_BY_WISH = MappingProxyType(dict.fromkeys(("add_norm_linear", "shared_down_add"), REFERENCE_ONLY))

# Best first. An op's order names providers that it may not have: PROVIDERS says which it has. The entry "*" is for ops
# without an order of their own.
PROVIDER_ORDER: Mapping[str, Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "cpu": MappingProxyType({"*": REFERENCE_ONLY}),
        "gfx*": MappingProxyType({"*": ("hip", "aiter", "torch", "triton", "reference"), **_BY_WISH}),
        # Triton's tiles of linear name the library that torch calls where it is the faster one.
        "sm_*": MappingProxyType(
            {"*": ("torch", "triton", "reference"), "linear": ("triton", "torch", "reference"), **_BY_WISH}
        ),
        "*": MappingProxyType({"*": REFERENCE_ONLY}),
    }
)

# Every op and its providers, for those who may not load torch; ops/bind.py has the functions.
PROVIDERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "rms_norm": ("reference", "hip", "aiter", "triton"),
        "add_rms_norm": ("reference", "hip", "aiter", "triton"),
        "gated_rms_norm": ("reference", "hip", "triton"),
        "linear": ("reference", "aiter", "torch", "triton"),
        "add_norm_linear": ("reference", "triton"),
        "fp8_linear": ("reference", "aiter", "triton"),
        "silu_mul": ("reference", "triton"),
        "sigmoid_mul": ("reference", "triton"),
        "shared_expert_add": ("reference", "triton"),
        "shared_down_add": ("reference", "triton"),
        "moe_route": ("reference", "triton"),
        "moe_experts": ("reference", "aiter", "triton"),
        "quantise_rows": ("reference", "triton"),
        "qk_norm_rope": ("reference", "hip", "triton"),
        "qk_norm_rope_kv_write": ("reference", "triton"),
        "kv_write": ("reference", "aiter", "triton"),
        "attention_prefill": ("reference", "aiter", "triton"),
        "attention_decode": ("reference", "aiter", "triton"),
        "causal_conv": ("reference", "triton"),
        "gdn_chunk": ("reference", "aiter", "triton"),
        "gdn_decode": ("reference", "aiter", "triton"),
        "gdn_extend": ("reference", "triton"),
        "gdn_step": ("reference", "triton"),
        "draw_token": ("reference", "triton"),
        "log_sum_exp": ("reference", "triton"),
    }
)

# Ops whose kernel does the work of others, which layers call where its reference is bound (Op.parts).
PARTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "add_norm_linear": ("add_rms_norm", "linear"),
        "gdn_step": ("causal_conv", "gdn_decode", "gated_rms_norm"),
        "qk_norm_rope_kv_write": ("qk_norm_rope", "kv_write"),
        "shared_down_add": ("silu_mul", "linear", "sigmoid_mul"),
        "shared_expert_add": ("sigmoid_mul",),
    }
)

_GPUS = frozenset({"gfx*", "sm_*"})
# Where Triton has instructions for e4m3: gfx942 in its own dialect, NVIDIA from sm_89 on.
_FROM_SM_100 = "sm_1*"
_GPUS_OF_TRITONS_FP8 = frozenset({"gfx942", "gfx950", "sm_89", "sm_90", _FROM_SM_100})
# Where a provider's code runs at all, whatever is installed there. The reference runs anywhere.
_ARCHS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "hip": frozenset({"gfx942", "gfx950", "sm_*"}),
        "aiter": frozenset({"gfx942", "gfx950"}),
        "torch": _GPUS,
        "triton": _GPUS,
    }
)
_ARCHS_OF_TRITONS = MappingProxyType(
    dict.fromkeys(("fp8_linear", "moe_experts", "quantise_rows"), _GPUS_OF_TRITONS_FP8)
)

# Providers that lay an op's weights out their own way after loading: both layouts exist for a moment.
LAY_OUT: Mapping[str, tuple[str, ...]] = MappingProxyType({"fp8_linear": ("aiter",), "moe_experts": ("aiter",)})

_LAYER_OP = re.compile(r"layers\.(0|[1-9][0-9]*)\.(\w+)")  # one spelling of a layer: two could contradict each other

# How FP8 weights meet the rows: dequantised against bf16 rows, or against rows quantised per 128 columns.
Fp8Activation = Literal["bf16", "fp8_1x128"]
FP8_ACTIVATION: Mapping[str, Fp8Activation] = MappingProxyType({"cpu": "bf16", "*": "fp8_1x128"})


def provider_order(op: str, arch: str) -> tuple[str, ...]:
    """Return the names of the providers that `op` has, in the order to try them on `arch`."""
    names = (arch, "gfx*" if arch.startswith("gfx") else "sm_*" if arch.startswith("sm_") else "*", "*")
    by_op = next(PROVIDER_ORDER[name] for name in names if name in PROVIDER_ORDER)
    order = by_op.get(op, by_op.get("*", REFERENCE_ONLY))
    return tuple(name for name in order if name in PROVIDERS[op])


def archs_of(op: str, provider: str) -> frozenset[str] | None:
    """Return the architectures and families ("gfx*", "sm_*") that a provider of `op` runs on; None: any."""
    if provider == "triton" and op in _ARCHS_OF_TRITONS:
        return _ARCHS_OF_TRITONS[op]
    return _ARCHS.get(provider)


def not_on(arch: str, archs: frozenset[str] | None) -> str | None:
    """Say why what runs on `archs` does not run on `arch`, or None where it does."""
    if archs is None or any(fnmatch(_plain(arch), _plain(known)) for known in archs):
        return None
    known = sorted(archs - {_FROM_SM_100}) + ["sm_100 and later"] * (_FROM_SM_100 in archs)
    return f"runs on {', '.join(known)}, not on {arch}"


def _plain(arch: str) -> str:
    return arch.replace("_", "")  # the probe says sm_90, people say sm90


def split_wish(name: str) -> tuple[int | None, str]:
    """Split the name of an override: "op", of all layers, or "layers.N.op"."""
    match = _LAYER_OP.fullmatch(name)
    return (int(match[1]), match[2]) if match else (None, name)


def laid_out(arch: str, overrides: Mapping[str, str]) -> frozenset[str]:
    """Name the ops whose weights are laid out anew on `arch`, if the provider that is tried first is bound.

    `overrides`: "op" or "layers.N.op" to a provider.
    """
    first = {op: overrides.get(op, provider_order(op, arch)[0]) for op in LAY_OUT}
    by_layer = [(name.rpartition(".")[2], provider) for name, provider in overrides.items()]
    return frozenset(op for op, provider in (*first.items(), *by_layer) if provider in LAY_OUT.get(op, ()))


def fp8_activation(arch: str) -> Fp8Activation:
    """Return the default activation of FP8 products on `arch`."""
    return FP8_ACTIVATION.get(arch, FP8_ACTIVATION["*"])
