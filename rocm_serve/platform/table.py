"""Which provider of an op is tried first, by architecture. Pure data; the first one that accepts is bound.

Architectures: "cpu", "gfx942", "gfx950", "sm90", and whatever else the probe names. "*" stands for the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

REFERENCE_ONLY = ("reference",)

PROVIDER_ORDER: Mapping[str, Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {"*": MappingProxyType({"*": REFERENCE_ONLY})}
)

# Every op and its providers, for those who may not load torch; ops/bind.py has the functions.
PROVIDERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    dict.fromkeys(
        (
            "rms_norm",
            "add_rms_norm",
            "gated_rms_norm",
            "linear",
            "fp8_linear",
            "silu_mul",
            "sigmoid_mul",
            "moe_route",
            "moe_experts",
            "qk_norm_rope",
            "kv_write",
            "attention_prefill",
            "attention_decode",
            "causal_conv",
            "gdn_chunk",
            "gdn_decode",
        ),
        REFERENCE_ONLY,
    )
)

# How FP8 weights meet the rows: dequantised against bf16 rows, or against rows quantised per 128 columns.
FP8_ACTIVATION: Mapping[str, str] = MappingProxyType({"cpu": "bf16", "*": "fp8_1x128"})


def provider_order(op: str, arch: str) -> tuple[str, ...]:
    """Return the names of the providers of `op` to try on `arch`, best first."""
    by_op = PROVIDER_ORDER.get(arch, PROVIDER_ORDER["*"])
    return by_op.get(op, by_op.get("*", REFERENCE_ONLY))


def fp8_activation(arch: str) -> str:
    """Return the default activation of FP8 products on `arch`."""
    return FP8_ACTIVATION.get(arch, FP8_ACTIVATION["*"])
