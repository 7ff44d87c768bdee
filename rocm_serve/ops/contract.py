"""One operator, one contract, several providers.

An op is a function of tensors with written semantics: its reference. A provider is another implementation with the
same signature. Which one runs where is decided once, in ops/bind.py; the hot path holds plain functions.

Providers own the physical layout of an op's weights. One that wants them otherwise than the checkpoint has them names
its layout and brings a `prepare_weights`; the layout's tag travels on the very tensor that is passed, and ops/bind.py
has every call refuse another one.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from rocm_serve.platform.table import not_on

OpFunction = Callable[..., torch.Tensor]
Arguments = dict[str, object]  # keyword arguments of one call
Facts = Mapping[str, object]  # what is static in a model, named in ops/facts.py; a name may be absent
WeightTensors = dict[str, torch.Tensor]  # the weights of one call, by the op's argument names
PrepareWeights = Callable[[WeightTensors], WeightTensors]
Case = Callable[[torch.Generator, torch.dtype], Arguments]


@dataclass(frozen=True, slots=True)
class Tol:
    """A bound on |a - b|_2 / |b|_2 against the reference in float64, and where the number comes from."""

    rel: float
    why: str


@dataclass(frozen=True, slots=True)
class OwnBound(Tol):
    """A provider's own, wider than that of all, where what is noisy leaves results as right as they were.

    `exact`: the op in plain torch without that which is noisy. A result beyond the bound of all must be as far from it
    as the reference is (ops/judging.py).
    """

    exact: OpFunction


def lazy(module: str, function: str) -> Callable[[], OpFunction]:
    """Return a loader that imports `module` when it is called, not before."""

    def load() -> OpFunction:
        found: OpFunction = getattr(importlib.import_module(module), function)
        return found

    return load


_TAG = "rocm_serve_layout"
PLAIN = "plain"  # as in the checkpoint, in the FP8 dialect of the machine


class LayoutError(ValueError):
    """A weight is laid out for another provider than the one that was given it."""


@dataclass(frozen=True, slots=True)
class Provider:
    """One implementation. `archs` None: any; "gfx*" and "sm_*" are families.

    `accepts` returns why it cannot serve these facts, or None.
    `prepare_weights` is called once for each layer, after loading: it takes the layer's plain weights of this op and
    returns tensors of the same names and the same number of bytes (the memory plan counts on that) in the layout
    `layout`. It may set attributes of its own on them: they stay on the tensors that the op is called with.
    `semantics` is plain torch for what the provider means to compute where that is not what the reference computes, and
    judges it in the reference's place: two ways of quantising rows differ by more than any kernel's error.
    `bound` returns a bound of its own, with the reason, for an architecture and these facts (`dtype`, `activation`,
    `expert_fp8`, and the `rows` of a call), or None: it is held to that of all providers.
    """

    name: str
    load: Callable[[], OpFunction]  # imports the implementation; called only when the provider is chosen
    archs: frozenset[str] | None = None
    accepts: Callable[[Facts], str | None] = lambda facts: None
    prepare_weights: PrepareWeights | None = None
    layout: str = PLAIN
    semantics: OpFunction | None = None
    bound: Callable[[str, Facts], OwnBound | None] = lambda arch, facts: None
    packages: tuple[str, ...] = ()  # distributions whose code it runs: their versions are part of a probe's cache key

    def __post_init__(self) -> None:
        assert (self.prepare_weights is None) == (self.layout == PLAIN), f"{self.name}: a layout needs its preparation"

    def refusal(self, arch: str, facts: Facts) -> str | None:
        """Say why this provider cannot be used, or None when it can."""
        return not_on(arch, self.archs) or self.accepts(facts)


@dataclass(frozen=True, slots=True)
class Op:
    """The contract. `mutates` names arguments written in place: they are outputs of the op beside its result.

    `weights` names the arguments that are a layer's parameters and may be laid out by the provider.
    `parts` names the ops whose work this one does: where its reference is bound, a layer calls those.
    """

    name: str
    reference: OpFunction
    cases: Mapping[str, Case]
    tol: Mapping[str, Tol]  # by name of the dtype of the rows: "float32", "bfloat16"
    mutates: tuple[str, ...] = ()
    others: tuple[Provider, ...] = ()
    weights: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names = [p.name for p in self.providers.values()]
        assert len(names) == 1 + len(self.others), f"{self.name}: a provider is named twice"

    @property
    def providers(self) -> Mapping[str, Provider]:
        """Return every provider by name, the reference among them."""
        reference = Provider("reference", lambda: self.reference)
        return MappingProxyType({p.name: p for p in (reference, *self.others)})


def layout_tag(weight: torch.Tensor) -> str:
    """Return the layout that the tensor was tagged with; a tensor without a tag is plain."""
    tag = getattr(weight, _TAG, PLAIN)
    assert isinstance(tag, str)
    return tag


def tag_layout(weight: torch.Tensor, layout: str) -> None:
    """Write the layout on this very tensor: views, copies and casts of it have no tag."""
    setattr(weight, _TAG, layout)


FP32_WHY = "fp32 sums in another order: some 1e-7 a step, a few hundred steps"
BF16_WHY = "one rounding of the result to 8 bits: at most 2^-9 relative, 2^-9 / sqrt(3) on average"


def rounding_tolerances(float32: float = 2e-6, bfloat16: float = 4e-3) -> Mapping[str, Tol]:
    """Return the bounds of an op that computes in fp32 and rounds once at the end."""
    return MappingProxyType({"float32": Tol(float32, FP32_WHY), "bfloat16": Tol(bfloat16, BF16_WHY)})
