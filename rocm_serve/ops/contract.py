"""One operator, one contract, several providers.

An op is a function of tensors with written semantics: its reference. A provider is another implementation with the
same signature. Which one runs where is decided once, in ops/bind.py; the hot path holds plain functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

OpFunction = Callable[..., torch.Tensor]
Arguments = dict[str, object]  # keyword arguments of one call
Facts = Mapping[str, object]  # what is static in a model: dtype, head size, page size ...
Case = Callable[[torch.Generator, torch.dtype], Arguments]


@dataclass(frozen=True, slots=True)
class Tol:
    """A bound on |a - b|_2 / |b|_2 against the reference in float64, and where the number comes from."""

    rel: float
    why: str


@dataclass(frozen=True, slots=True)
class Provider:
    """One implementation. `archs` None: any. `accepts` returns why it cannot serve these facts, or None."""

    name: str
    load: Callable[[], OpFunction]  # imports the implementation; called only when the provider is chosen
    archs: frozenset[str] | None = None
    accepts: Callable[[Facts], str | None] = lambda facts: None

    def refusal(self, arch: str, facts: Facts) -> str | None:
        """Say why this provider cannot be used, or None when it can."""
        if self.archs is not None and arch not in self.archs:
            return f"runs on {', '.join(sorted(self.archs))}, not on {arch}"
        return self.accepts(facts)


@dataclass(frozen=True, slots=True)
class Op:
    """The contract. `mutates` names arguments written in place: they are outputs of the op beside its result."""

    name: str
    reference: OpFunction
    cases: Mapping[str, Case]
    tol: Mapping[str, Tol]  # by name of the dtype of the rows: "float32", "bfloat16"
    mutates: tuple[str, ...] = ()
    others: tuple[Provider, ...] = ()

    def __post_init__(self) -> None:
        names = [p.name for p in self.providers.values()]
        assert len(names) == 1 + len(self.others), f"{self.name}: a provider is named twice"

    @property
    def providers(self) -> Mapping[str, Provider]:
        """Return every provider by name, the reference among them."""
        reference = Provider("reference", lambda: self.reference)
        return MappingProxyType({p.name: p for p in (reference, *self.others)})


FP32_WHY = "fp32 sums in another order: some 1e-7 a step, a few hundred steps"
BF16_WHY = "one rounding of the result to 8 bits: at most 2^-9 relative, 2^-9 / sqrt(3) on average"


def rounding_tolerances(float32: float = 2e-6, bfloat16: float = 4e-3) -> Mapping[str, Tol]:
    """Return the bounds of an op that computes in fp32 and rounds once at the end."""
    return MappingProxyType({"float32": Tol(float32, FP32_WHY), "bfloat16": Tol(bfloat16, BF16_WHY)})
