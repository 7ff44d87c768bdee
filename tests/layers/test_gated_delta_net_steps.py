"""Gated DeltaNet where gdn_step is bound: the bits of its parts, whatever a step mixes."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import Any

import pytest
import torch

from rocm_serve.ops.batch import Sequences
from rocm_serve.ops.bind import OPS, BoundOps, bind_ops
from rocm_serve.ops.contract import Provider
from tests.layers.columns import by_column
from tests.layers.replaying import Request, Run, Turn, at_random, every_pair, facts_of, in_step, layer_of

PARTS = bind_ops({}, "cpu")
SIZES = {"key": 20, "value": 37, "key_heads": 1, "value_heads": 3}


def stepping(seen: list[Sequences]) -> BoundOps:
    """Bind the reference of gdn_step as a kernel would be; note the sequences that it is called with."""

    def gdn_step(*arguments: Any, **scalars: Any) -> torch.Tensor:
        seen.append(arguments[10])
        return OPS["gdn_step"].reference(*arguments, **scalars)

    bound = {**PARTS.providers, "gdn_step": Provider("kernel", lambda: gdn_step)}
    return replace(PARTS, gdn_step=gdn_step, providers=bound)


def run_of(seen: list[Sequences], seed: int, draft_tokens: int) -> tuple[Run, Run]:
    """Make two runs of one layer: by parts, and by steps."""
    print(f"seed {seed}")
    facts = facts_of(**SIZES)
    bound = [replace(ops, linear=by_column) for ops in (PARTS, stepping(seen))]  # only one of them joins weights
    layers = [layer_of(facts, ops, torch.Generator().manual_seed(seed)) for ops in bound]
    parts, steps = (Run(layer, facts, torch.Generator().manual_seed(seed), draft_tokens) for layer in layers)
    return parts, steps


def test_steps_with_prompts_recurrent_rows_and_drafts_have_the_bits_of_parts() -> None:
    seen: list[Sequences] = []
    parts, steps = run_of(seen, secrets.randbits(31), 3)
    requests, order = at_random(parts.g, 5, 3)
    alone = len(requests)
    requests.append(Request(4, 5, [Turn(), Turn()]))
    parts.plainly(requests)
    assert not steps.differences(requests, [*order, [alone], [alone], [alone]])
    assert any(run.commits is not None for run in seen) and any(run.commits is None for run in seen)
    assert all(run.num_recurrent == run.num_sequences for run in seen)


def test_accepted_drafts_are_plain_steps_for_every_m_and_n() -> None:
    parts, steps = run_of([], secrets.randbits(31), 2)
    requests = every_pair(2, 1)
    parts.plainly(requests)
    assert not steps.differences(requests, in_step(requests))


def test_requests_have_the_bits_they_have_alone_where_one_product_of_torch_makes_all_projections() -> None:
    seed = secrets.randbits(31)
    print(f"seed {seed}")
    facts, g, seen = facts_of(**SIZES), torch.Generator().manual_seed(seed), list[Sequences]()
    steps = Run(layer_of(facts, stepping(seen), g), facts, g, 3)
    requests, order = at_random(g, 5, 3)
    steps.plainly(requests)
    seen.clear()
    assert not steps.differences(requests, order)
    assert any(run.num_sequences > 1 for run in seen) and any(run.commits is not None for run in seen)


@pytest.mark.parametrize("by_parts", [True, False])
def test_without_a_kernel_or_when_told_so_the_layer_runs_by_parts(by_parts: bool) -> None:
    seen: list[Sequences] = []
    parts, steps = run_of(seen, 1, 1)
    if by_parts:
        steps.layer.run_by_parts()
    requests, order = at_random(parts.g, 2, 1)
    parts.plainly(requests)
    assert not seen
    assert not steps.differences(requests, order)
    assert bool(seen) is not by_parts


@pytest.mark.parametrize("prepared", [False, True])
def test_one_product_makes_all_projections_unless_its_weights_are_laid_out_anew(prepared: bool) -> None:
    bound, calls = stepping([]), list[torch.Size]()

    def linear(x_TK: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
        calls.append(weight_NK.shape)
        return PARTS.linear(x_TK, weight_NK)

    provider = Provider("kernel", lambda: linear, prepare_weights=lambda some: some, layout="turned")
    providers = {**bound.providers, **({"linear": provider} if prepared else {})}
    ops, facts, g = replace(bound, linear=linear, providers=providers), facts_of(**SIZES), torch.Generator()
    run = Run(layer_of(facts, ops, g), facts, g, 0)
    requests, _ = at_random(g, 1, 0)
    run.plainly(requests)
    gates = 2 * facts.linear_num_value_heads
    all_rows = 2 * facts.key_dim + 2 * facts.value_dim + gates
    assert {shape[0] for shape in calls} == {facts.hidden_size} | (
        {all_rows - gates, gates} if prepared else {all_rows}
    )
