"""Every op, and the choice of its provider: made once, when a model is built."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, Literal

from rocm_serve.errors import UserError
from rocm_serve.ops import (
    add_norm_linear,
    attention_decode,
    attention_prefill,
    causal_conv,
    fp8_linear,
    gated_rms_norm,
    gdn_chunk,
    gdn_decode,
    gdn_extend,
    gdn_step,
    kv_write,
    linear,
    moe_experts,
    moe_route,
    qk_norm_rope,
    qk_norm_rope_kv_write,
    quantise_rows,
    rms_norm,
    sampling,
    shared_down_add,
    shared_expert_add,
    sigmoid_mul,
    silu_mul,
)
from rocm_serve.ops.contract import Facts, Op, OpFunction, Provider, WeightTensors
from rocm_serve.ops.layouts import checked, prepared
from rocm_serve.ops.tuning import tuning
from rocm_serve.platform.table import fp8_activation, provider_order, split_wish

_ALL = (
    rms_norm.OP,
    rms_norm.ADD_OP,
    gated_rms_norm.OP,
    linear.OP,
    add_norm_linear.OP,
    fp8_linear.OP,
    silu_mul.OP,
    sigmoid_mul.OP,
    shared_expert_add.OP,
    shared_down_add.OP,
    moe_route.OP,
    moe_experts.OP,
    quantise_rows.OP,
    qk_norm_rope.OP,
    qk_norm_rope_kv_write.OP,
    kv_write.OP,
    attention_prefill.OP,
    attention_decode.OP,
    causal_conv.OP,
    gdn_chunk.OP,
    gdn_decode.OP,
    gdn_extend.OP,
    gdn_step.OP,
    sampling.OP,
    sampling.SUM_OP,
)
OPS: Mapping[str, Op] = MappingProxyType({op.name: op for op in _ALL})
REFERENCE = "reference"


@dataclass(frozen=True, slots=True)
class Binding:
    """One line of the start-up report."""

    op: str  # "linear", or "layers.3.linear" for an override of one layer
    provider: str
    refused: tuple[tuple[str, str], ...]  # (provider, why), in the order they were tried
    tuning: str = ""  # of its kernels at these shapes: tuned or by rule
    fell_back: bool = False  # the reference runs, since a probe refused what would have been bound


def binding_lines(report: Sequence[Binding]) -> Iterator[str]:
    """Say who provides what: in one line where all is the same and nothing was refused, else one line each."""
    providers = {line.provider for line in report}
    if len(providers) == 1 and not any(line.refused for line in report):
        yield f"ops: all {len(report)} by {providers.pop()}"
        return
    for line in report:
        how = f" ({line.tuning})" if line.tuning else ""
        yield f"op {line.op}: {line.provider}{how}" + "".join(f"; {name} {why}" for name, why in line.refused)


@dataclass(frozen=True)
class BoundOps:
    """The chosen function of every op. Layers hold one of these and call plain functions."""

    rms_norm: OpFunction
    add_rms_norm: OpFunction
    gated_rms_norm: OpFunction
    linear: OpFunction
    add_norm_linear: OpFunction
    fp8_linear: OpFunction
    silu_mul: OpFunction
    sigmoid_mul: OpFunction
    shared_expert_add: OpFunction
    shared_down_add: OpFunction
    moe_route: OpFunction
    moe_experts: OpFunction
    quantise_rows: OpFunction
    qk_norm_rope: OpFunction
    qk_norm_rope_kv_write: OpFunction
    kv_write: OpFunction
    attention_prefill: OpFunction
    attention_decode: OpFunction
    causal_conv: OpFunction
    gdn_chunk: OpFunction
    gdn_decode: OpFunction
    gdn_extend: OpFunction
    gdn_step: OpFunction
    draw_token: OpFunction
    log_sum_exp: OpFunction
    fp8_activation: str
    report: tuple[Binding, ...]
    providers: Mapping[str, Provider]
    table: Mapping[str, Op]
    at_layer: Mapping[int, Mapping[str, tuple[Provider, OpFunction]]] = field(default_factory=dict)

    def for_layer(self, layer: int) -> BoundOps:
        """Return the ops of one layer: these, with the overrides "layers.N.op" applied."""
        own = self.at_layer.get(layer, {})
        functions: dict[str, Any] = {name: function for name, (_, function) in own.items()}
        providers = {**self.providers, **{name: provider for name, (provider, _) in own.items()}}
        return replace(self, **functions, providers=providers) if own else self

    def prepare(self, op: str, weights: WeightTensors) -> WeightTensors:
        """Lay plain weights, given by the op's argument names, out as the bound provider reads them."""
        return prepared(self.table[op], self.providers[op], weights)

    @property
    def preparing(self) -> frozenset[str]:
        """Name the ops that lay weights out anew, in some layer at least."""
        chosen = [*self.providers.items(), *((n, p) for own in self.at_layer.values() for n, (p, _) in own.items())]
        return frozenset(name for name, provider in chosen if provider.prepare_weights is not None)


def bind_ops(
    overrides: Mapping[str, str],
    arch: str,
    *,
    facts: Facts | None = None,
    activation: Literal["bf16", "fp8_1x128"] | None = None,
    table: Mapping[str, Op] | None = None,
    refused: Mapping[tuple[str, str], str] | None = None,
    preferred: Mapping[str, str] | None = None,
) -> BoundOps:
    """Choose a provider for every op and load it.

    `overrides` maps "op" or "layers.N.op" to a provider. `facts` are shown to providers that accept some models only.
    `activation` of FP8 products; default by architecture. `table`: the ops; `refused`: (op, provider) -> why, of those
    that failed their probe; `preferred`: op -> provider to try before all others.
    Errors: UserError for an unknown op or provider, or a provider that refuses, naming the legal ones.
    """
    ops = OPS if table is None else table
    report = choose(overrides, arch, facts=facts, table=ops, refused=refused, preferred=preferred)
    chosen: dict[str, Provider] = {}
    own: dict[int, dict[str, Provider]] = {}
    for line in report:
        layer, name = _split(line.op, ops)
        (chosen if layer is None else own.setdefault(layer, {}))[name] = ops[name].providers[line.provider]
    several = {name for one in (chosen, *own.values()) for name, p in one.items() if p.prepare_weights is not None}

    def function(name: str, provider: Provider) -> OpFunction:
        found = provider.load()
        return checked(ops[name], provider, found) if name in several else found

    functions: dict[str, Any] = {name: function(name, provider) for name, provider in chosen.items()}
    return BoundOps(
        **functions,
        fp8_activation=activation or fp8_activation(arch),
        report=tuple(report),
        providers=chosen,
        table=ops,
        at_layer={n: {name: (p, function(name, p)) for name, p in some.items()} for n, some in own.items()},
    )


def choose(
    overrides: Mapping[str, str],
    arch: str,
    *,
    facts: Facts | None = None,
    table: Mapping[str, Op] | None = None,
    refused: Mapping[tuple[str, str], str] | None = None,
    preferred: Mapping[str, str] | None = None,
) -> list[Binding]:
    """Say what `bind_ops` would bind, loading nothing: a line for every op, then one for every override of a layer.

    Errors: as of `bind_ops`.
    """
    ops = OPS if table is None else table
    known, against = facts or {}, refused or {}
    wished = _wished(overrides, ops)
    report = []
    for name, op in ops.items():
        override = wished.get((None, name))
        if override:
            report.append(_forced(op, name, override, arch, known, against))
        else:
            first = (preferred or {}).get(name)
            order = provider_order(name, arch)
            report.append(_first(op, (first, *order) if first else order, arch, known, against))
    for (layer, name), provider in sorted(wished.items(), key=lambda item: (item[0][0] or 0, item[0][1])):
        if layer is not None:
            report.append(_forced(ops[name], f"layers.{layer}.{name}", provider, arch, known, against))
    return [replace(line, tuning=tuning(_split(line.op, ops)[1], line.provider, known)) for line in report]


def _wished(overrides: Mapping[str, str], ops: Mapping[str, Op]) -> dict[tuple[int | None, str], str]:
    """Return the overrides by layer and op. One of a part has the parts run, unless the whole is overridden as well."""
    wished = {_split(key, ops): provider for key, provider in overrides.items()}
    for layer, name in tuple(wished):
        for whole in ops.values():
            if name in whole.parts:
                wished.setdefault((layer, whole.name), REFERENCE)
    return wished


def op_names() -> tuple[str, ...]:
    """Return the names of all ops in the order of `BoundOps`."""
    return tuple(f.name for f in fields(BoundOps) if f.name in OPS)


def _split(key: str, ops: Mapping[str, Op]) -> tuple[int | None, str]:
    layer, name = split_wish(key)
    if name not in ops:
        raise UserError(f"--op {key}: no such op; ops are {', '.join(ops)}, each also as layers.N.OP")
    return layer, name


Refused = Mapping[tuple[str, str], str]


def _forced(op: Op, key: str, provider: str, arch: str, facts: Facts, refused: Refused) -> Binding:
    if provider not in op.providers:
        raise UserError(f"--op {key}={provider}: no such provider; {op.name} has {', '.join(op.providers)}")
    why = _refusal(op, provider, arch, facts, refused)
    if why:
        raise UserError(f"--op {key}={provider}: {provider} {why}; {op.name} has {', '.join(op.providers)}")
    return Binding(key, provider, ())


def _first(op: Op, order: tuple[str, ...], arch: str, facts: Facts, refused: Refused) -> Binding:
    tried: list[tuple[str, str]] = []
    for name in dict.fromkeys(order):
        why = _refusal(op, name, arch, facts, refused)
        if why is None:
            slow = name == REFERENCE and not op.parts  # the parts of another have lines of their own
            failed = any((op.name, other) in refused for other, _ in tried)
            return Binding(op.name, name, tuple(tried), fell_back=slow and failed)
        tried.append((name, why))
    raise UserError(f"{op.name} has no provider on {arch}: {'; '.join(f'{n} {why}' for n, why in tried)}")


def _refusal(op: Op, provider: str, arch: str, facts: Facts, refused: Refused) -> str | None:
    """Say why a provider cannot be used: for what it says of itself, or for what its probe has shown."""
    return op.providers[provider].refusal(arch, facts) or refused.get((op.name, provider))
