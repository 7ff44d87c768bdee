"""Static facts of a tiny model, for probes on a CPU."""

from __future__ import annotations

from typing import Any

from rocm_serve.ops.facts import LinearShape, OpFacts


def tiny_facts(**changes: Any) -> OpFacts:
    values: dict[str, Any] = {
        "arch": "cpu",
        "dtype": "bfloat16",
        "kv_dtype": "bfloat16",
        "fp8_dialect": "fn",
        "activation": "fp8_1x128",
        "tp": 1,
        "hidden_size": 128,
        "eps": 1e-6,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 64,
        "rotary_dim": 16,
        "page_size": 16,
        "key_heads": 2,
        "value_heads": 4,
        "key_dim": 32,
        "value_dim": 48,
        "conv_kernel": 4,
        "gate_activation": "silu",
        "num_experts": 6,
        "top_k": 2,
        "renormalise": True,
        "expert_width": 128,
        "expert_fp8": True,
        "mlp_width": 96,
        "linears": (LinearShape(128, 256, True), LinearShape(160, 128, False)),
        "vocab": 96,
        "max_rows": 40,
        "max_running": 8,
        "max_model_len": 128,
    }
    values |= changes
    return OpFacts(**{"local_experts": values["num_experts"]} | values)
