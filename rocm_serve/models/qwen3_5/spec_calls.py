"""Which ops each layer of a Qwen3.5-family model calls, in one form of it at least. Pure, no torch.

An op and those that it does the work of (`Op.parts`) are both called: which of them it is, is decided when providers
are bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from rocm_serve.models.qwen3_5.spec_facts import ModelFacts
from rocm_serve.models.qwen3_5.spec_formats import promised_fp8
from rocm_serve.parallel.mesh import split_layers

_IN_ALL = ("add_rms_norm", "silu_mul")
_FULL = ("qk_norm_rope", "qk_norm_rope_kv_write", "kv_write", "attention_prefill", "attention_decode", "sigmoid_mul")
_LINEAR = ("causal_conv", "gdn_chunk", "gdn_decode", "gdn_step", "gated_rms_norm")
_MOE = ("moe_route", "moe_experts", "sigmoid_mul", "shared_expert_add")


@dataclass(frozen=True, slots=True)
class Calls:
    """The ops that a launch calls.

    `by_layer`: of every layer of the model, on whichever stage it is. `beside`: of the draft layer, and before and
    behind the layers, where an override of one layer does not reach.
    """

    by_layer: tuple[frozenset[str], ...]
    beside: frozenset[str]

    def layers(self, op: str) -> tuple[int, ...]:
        """Return the layers that call `op`."""
        return tuple(i for i, ops in enumerate(self.by_layer) if op in ops)

    def anywhere(self, op: str) -> bool:
        """Whether anything calls `op`."""
        return op in self.beside or any(op in ops for ops in self.by_layer)


def calls_of(facts: ModelFacts, pp: int, *, drafts: bool, sends: bool, draft_sends: bool, fp8_rows: bool) -> Calls:
    """List the ops of a launch of `pp` stages.

    `drafts`: the draft layer runs, and steps verify what it drafted. `sends`: rows go to the ranks of their experts;
    `draft_sends`: those of the draft layer do. `fp8_rows`: FP8 weights are multiplied with rows as FP8.
    """
    layer = partial(_ops_of, facts, drafts=drafts, fp8_rows=fp8_rows)
    firsts = {layers[0] for layers in split_layers(facts.num_layers, pp)}
    by_layer = tuple(
        frozenset(layer(f"model.layers.{i}", full_attention=kind == "full_attention", first=i in firsts, sends=sends))
        for i, kind in enumerate(facts.layer_types)
    )
    beside = {"linear", "add_rms_norm", "draw_token", "log_sum_exp"}  # head, last norm, sampler
    if drafts:
        beside |= {"rms_norm", *layer("mtp.layers.0", full_attention=True, first=True, sends=draft_sends)}
    return Calls(by_layer, frozenset(beside))


def _ops_of(
    facts: ModelFacts, prefix: str, *, full_attention: bool, first: bool, drafts: bool, sends: bool, fp8_rows: bool
) -> Iterator[str]:
    """List the ops of one layer. `first` of its stage: nothing is left to be added to the rows that come in."""

    def fp8(name: str) -> bool:
        return promised_fp8(facts, f"{prefix}.{name}.weight")

    mlp = "mlp.shared_expert" if facts.is_moe else "mlp"
    mixer = ("self_attn.q_proj", "self_attn.o_proj")
    if not full_attention:
        mixer = ("linear_attn.in_proj_qkv", "linear_attn.out_proj")
    products = [fp8(name) for name in (*mixer, f"{mlp}.gate_proj", f"{mlp}.down_proj")]
    yield from _IN_ALL
    yield from _FULL if full_attention else _LINEAR
    if any(products):
        yield "fp8_linear"
    if not all(products) or not full_attention or facts.is_moe:  # b and a of GDN and the router are never FP8
        yield "linear"
    if first:
        yield "rms_norm"
    elif not (fp8(mixer[0]) or fp8(f"{mlp}.gate_proj") or (facts.is_moe and sends)):
        yield "add_norm_linear"
    if drafts and not full_attention:
        yield "gdn_extend"
    if facts.is_moe:
        yield from _MOE
        if not fp8(f"{mlp}.gate_proj") and not fp8(f"{mlp}.down_proj"):
            yield "shared_down_add"
        if sends and fp8_rows and fp8("mlp.experts.0.down_proj"):
            yield "quantise_rows"
