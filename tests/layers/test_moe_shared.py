"""The shared expert where shared_expert_add is bound: one call of the op, with the bits of its parts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from rocm_serve.layers.moe import SparseMoe
from rocm_serve.layers.weights import Weights
from rocm_serve.ops.bind import OPS, BoundOps, bind_ops
from rocm_serve.ops.contract import Provider
from rocm_serve.parallel.comm import Comm
from tests.layers.columns import by_column
from tests.layers.test_parallel import on_ranks
from tests.models.harness import hf_model


@pytest.fixture(scope="module")
def moe() -> nn.Module:
    return hf_model(seed=16, num_hidden_layers=1)


def with_kernel(ops: BoundOps, seen: list[int]) -> BoundOps:
    """Bind the reference of shared_expert_add as a kernel would be; note the rows that it is called with."""

    def shared_expert_add(*arguments: Any) -> torch.Tensor:
        seen.append(len(arguments[0]))
        return OPS["shared_expert_add"].reference(*arguments)

    bound = {**ops.providers, "shared_expert_add": Provider("kernel", lambda: shared_expert_add)}
    return replace(ops, shared_expert_add=shared_expert_add, providers=bound)


def product(x_TK: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
    """Multiply each column by itself, but for the shared expert's gate: it is joined to nothing, in either layer."""
    return OPS["linear"].reference(x_TK, weight_NK) if len(weight_NK) == 1 else by_column(x_TK, weight_NK)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("by_parts", [False, True])
def test_a_kernel_takes_the_place_of_the_parts_until_the_layer_is_told_to_leave_it(
    moe: nn.Module, tp: int, by_parts: bool
) -> None:
    seen: list[int] = []

    def build(weights: Weights, ops: BoundOps, comm: Comm) -> SparseMoe:
        bound = replace(with_kernel(ops, seen), linear=product)
        layer = SparseMoe(weights, bound, comm, top_k=3, renormalise=True)
        if by_parts:
            layer.run_by_parts()
        return layer

    def plain(weights: Weights, ops: BoundOps, comm: Comm) -> SparseMoe:
        return SparseMoe(weights, replace(ops, linear=product), comm, top_k=3, renormalise=True)

    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(3))
    ours, theirs = (on_ranks(moe, "model.layers.0.mlp", tp, one)(x, 32) for one in (build, plain))
    assert all(
        torch.equal(a, b) and calls == {"all_reduce": 1} for (a, calls), (b, _) in zip(ours, theirs, strict=True)
    )
    assert seen == ([] if by_parts else [32] * tp)


def test_without_a_kernel_the_cpu_runs_the_parts() -> None:
    assert bind_ops({}, "cpu").providers["shared_expert_add"].name == "reference"
