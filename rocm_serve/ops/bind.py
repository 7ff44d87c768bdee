"""Every op, and the choice of its provider: made once, when a model is built."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, Literal

from rocm_serve.errors import UserError
from rocm_serve.ops import (
    attention_decode,
    attention_prefill,
    causal_conv,
    fp8_linear,
    gated_rms_norm,
    gdn_chunk,
    gdn_decode,
    kv_write,
    linear,
    moe_experts,
    moe_route,
    qk_norm_rope,
    rms_norm,
    sigmoid_mul,
    silu_mul,
)
from rocm_serve.ops.contract import Facts, Op, OpFunction
from rocm_serve.platform.table import fp8_activation, provider_order

_ALL = (
    rms_norm.OP,
    rms_norm.ADD_OP,
    gated_rms_norm.OP,
    linear.OP,
    fp8_linear.OP,
    silu_mul.OP,
    sigmoid_mul.OP,
    moe_route.OP,
    moe_experts.OP,
    qk_norm_rope.OP,
    kv_write.OP,
    attention_prefill.OP,
    attention_decode.OP,
    causal_conv.OP,
    gdn_chunk.OP,
    gdn_decode.OP,
)
OPS: Mapping[str, Op] = MappingProxyType({op.name: op for op in _ALL})

_LAYER = re.compile(r"layers\.(\d+)\.(\w+)")


@dataclass(frozen=True, slots=True)
class Binding:
    """One line of the start-up report."""

    op: str  # "linear", or "layers.3.linear" for an override of one layer
    provider: str
    refused: tuple[tuple[str, str], ...]  # (provider, why), in the order they were tried


def binding_lines(report: Sequence[Binding]) -> Iterator[str]:
    """Say who provides what: in one line where all is the same and nothing was refused, else one line each."""
    providers = {line.provider for line in report}
    if len(providers) == 1 and not any(line.refused for line in report):
        yield f"ops: all {len(report)} by {providers.pop()}"
        return
    for line in report:
        yield f"op {line.op}: {line.provider}" + "".join(f"; {name} {why}" for name, why in line.refused)


@dataclass(frozen=True)
class BoundOps:
    """The chosen function of every op. Layers hold one of these and call plain functions."""

    rms_norm: OpFunction
    add_rms_norm: OpFunction
    gated_rms_norm: OpFunction
    linear: OpFunction
    fp8_linear: OpFunction
    silu_mul: OpFunction
    sigmoid_mul: OpFunction
    moe_route: OpFunction
    moe_experts: OpFunction
    qk_norm_rope: OpFunction
    kv_write: OpFunction
    attention_prefill: OpFunction
    attention_decode: OpFunction
    causal_conv: OpFunction
    gdn_chunk: OpFunction
    gdn_decode: OpFunction
    fp8_activation: str
    report: tuple[Binding, ...]
    at_layer: Mapping[int, Mapping[str, OpFunction]] = field(default_factory=dict)

    def for_layer(self, layer: int) -> BoundOps:
        """Return the ops of one layer: these, with the overrides "layers.N.op" applied."""
        own: dict[str, Any] = dict(self.at_layer.get(layer, {}))
        return replace(self, **own) if own else self


def bind_ops(
    overrides: Mapping[str, str],
    arch: str,
    *,
    facts: Facts | None = None,
    activation: Literal["bf16", "fp8_1x128"] | None = None,
) -> BoundOps:
    """Choose a provider for every op.

    `overrides` maps "op" or "layers.N.op" to a provider. `facts` are shown to providers that accept some models only.
    `activation` of FP8 products; default by architecture.
    Errors: UserError for an unknown op or provider, or a provider that refuses, naming the legal ones.
    """
    known = facts or {}
    wished = {_split(key): provider for key, provider in overrides.items()}
    chosen: dict[str, Any] = {}
    report = []
    for name, op in OPS.items():
        override = wished.get((None, name))
        binding = _forced(op, name, override, arch, known) if override else _first(op, arch, known)
        report.append(binding)
        chosen[name] = op.providers[binding.provider].load()
    at_layer: dict[int, dict[str, OpFunction]] = {}
    for (layer, name), provider in sorted(wished.items(), key=lambda item: (item[0][0] or 0, item[0][1])):
        if layer is not None:
            report.append(_forced(OPS[name], f"layers.{layer}.{name}", provider, arch, known))
            at_layer.setdefault(layer, {})[name] = OPS[name].providers[provider].load()
    return BoundOps(
        **chosen, fp8_activation=activation or fp8_activation(arch), report=tuple(report), at_layer=at_layer
    )


def op_names() -> tuple[str, ...]:
    """Return the names of all ops in the order of `BoundOps`."""
    return tuple(f.name for f in fields(BoundOps) if f.name in OPS)


def _split(key: str) -> tuple[int | None, str]:
    match = _LAYER.fullmatch(key)
    layer, name = (int(match[1]), match[2]) if match else (None, key)
    if name not in OPS:
        raise UserError(f"--op {key}: no such op; ops are {', '.join(OPS)}, each also as layers.N.OP")
    return layer, name


def _forced(op: Op, key: str, provider: str, arch: str, facts: Facts) -> Binding:
    if provider not in op.providers:
        raise UserError(f"--op {key}={provider}: no such provider; {op.name} has {', '.join(op.providers)}")
    why = op.providers[provider].refusal(arch, facts)
    if why:
        raise UserError(f"--op {key}={provider}: {provider} {why}; {op.name} has {', '.join(op.providers)}")
    return Binding(key, provider, ())


def _first(op: Op, arch: str, facts: Facts) -> Binding:
    refused = []
    for name in provider_order(op.name, arch):
        why = op.providers[name].refusal(arch, facts)
        if why is None:
            return Binding(op.name, name, tuple(refused))
        refused.append((name, why))
    raise UserError(f"{op.name} has no provider on {arch}: {'; '.join(f'{n} {why}' for n, why in refused)}")
