"""The ops of a step at a shape, by name: what `Point` names and what the benchmark measures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from rocm_serve.tuning.case import Case
from rocm_serve.tuning.cases_attention import attention
from rocm_serve.tuning.cases_experts import experts, route, shared_add
from rocm_serve.tuning.cases_folded import norm_in_product, shared_down
from rocm_serve.tuning.cases_gdn import conv, gdn, step
from rocm_serve.tuning.cases_linear import fp8_linear, head, linear
from rocm_serve.tuning.cases_prompts import attention_prefill, gdn_chunk, prompt_conv
from rocm_serve.tuning.cases_rows import kv_write, norms, qk, quantise

__all__ = [
    "CASES",
    "OP_OF",
    "Case",
    "attention",
    "attention_prefill",
    "conv",
    "experts",
    "fp8_linear",
    "gdn",
    "gdn_chunk",
    "head",
    "kv_write",
    "linear",
    "norm_in_product",
    "norms",
    "prompt_conv",
    "qk",
    "quantise",
    "route",
    "shared_add",
    "shared_down",
    "step",
]

_OPS = (
    (attention, "attention_decode"),
    (experts, "moe_experts"),
    (step, "gdn_step"),
    (gdn, "gdn_decode"),
    (conv, "causal_conv"),
    (linear, "linear"),
    (head, "linear"),
    (norm_in_product, "add_norm_linear"),
    (shared_down, "shared_down_add"),
    (norms, "add_rms_norm"),
    (route, "moe_route"),
    (qk, "qk_norm_rope_kv_write"),
    (shared_add, "shared_expert_add"),
    (kv_write, "kv_write"),
    (quantise, "quantise_rows"),
    (attention_prefill, "attention_prefill"),
    (gdn_chunk, "gdn_chunk"),
    (prompt_conv, "causal_conv"),
    (fp8_linear, "fp8_linear"),
)
CASES: Mapping[str, Callable[..., Case]] = MappingProxyType({case.__name__: case for case, _ in _OPS})
OP_OF: Mapping[str, str] = MappingProxyType({case.__name__: op for case, op in _OPS})  # that a case calls first
