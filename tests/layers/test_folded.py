"""A layer whose norms and shared expert are part of products, where kernels are bound for that: its parts' rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from rocm_serve.layers.attention import GatedAttention
from rocm_serve.layers.gated_delta_net import GatedDeltaNet
from rocm_serve.layers.moe import SparseMoe
from rocm_serve.ops.bind import OPS, BoundOps, bind_ops
from rocm_serve.ops.contract import OpFunction, Provider
from rocm_serve.ops.tiles_linear import FOLDED_ROWS, SHARED_ROWS
from rocm_serve.parallel.comm import Comm, SoloComm, run_ranks
from rocm_serve.parallel.mesh import Mesh
from rocm_serve.platform.table import provider_order
from tests.models import harness

WHOLE = ("gdn_step", "shared_expert_add")  # as a GPU has them; they join the projections
FOLDED = ("add_norm_linear", "shared_down_add")


@pytest.fixture(scope="module")
def hf() -> nn.Module:
    return harness.hf_model(seed=17, layer_types=["linear_attention", "full_attention"] * 2)


def with_kernels(names: tuple[str, ...], seen: Counter[str]) -> BoundOps:
    """Bind references as kernels would be; count the calls of all ops."""

    def counted(name: str, function: OpFunction) -> OpFunction:
        def call(*args: Any, **scalars: Any) -> Any:
            seen[name] += 1
            return function(*args, **scalars)

        return call

    ops = bind_ops({}, "cpu")
    functions: dict[str, Any] = {name: counted(name, op.reference) for name, op in OPS.items()}
    kernels = {name: Provider("kernel", lambda name=name: functions[name]) for name in names}  # type: ignore[misc]
    return replace(ops, **functions, providers={**ops.providers, **kernels})


def rows_of_steps(
    hf: nn.Module,
    names: tuple[str, ...],
    comm: Comm,
    tp: int,
    seen: Counter[str],
    told: Callable[[nn.Module], None] = lambda model: None,
) -> list[torch.Tensor]:
    """Return the last hidden rows of a step of two short prompts, of one decoding both, and of two with more rows."""
    ops = with_kernels(names, seen)
    stage = harness.build_stage(
        harness.facts_of(hf), hf.state_dict(), mesh=Mesh(tp, 1), rank=comm.rank, comm=comm, ops=ops
    )
    told(stage.model)
    a, b = harness.text(1), harness.text(2)
    left = []
    for chunks in (
        (harness.Chunk(a, [5]), harness.Chunk(b, [9, 3])),
        (harness.Chunk(a, [7], recurrent=True), harness.Chunk(b, [11], recurrent=True)),
        (harness.Chunk(a, [8], recurrent=True), harness.Chunk(b, list(range(FOLDED_ROWS)))),
        (harness.Chunk(a, [2], recurrent=True), harness.Chunk(b, list(range(SHARED_ROWS)))),
    ):
        batch = harness.make_batch(chunks, stage.cache, 16)
        n = batch.num_rows
        few = replace(batch, token_ids_T=batch.token_ids_T[:n], positions_T=batch.positions_T[:n])
        with torch.inference_mode():
            left.append(stage.model.forward(few, None))
        for chunk in chunks:
            chunk.text.tokens += chunk.tokens
            chunk.text.cached += len(chunk.tokens)
    return left


@pytest.mark.parametrize("tp", [1, 2])
def test_a_layer_of_few_rows_runs_fewer_ops_and_makes_the_rows_of_its_parts(hf: nn.Module, tp: int) -> None:
    def run(names: tuple[str, ...], seen: Counter[str]) -> list[torch.Tensor]:
        calls = [Counter[str]() for _ in range(tp)]  # one a rank: ranks are threads, which lose counts of one another
        rows = run_ranks(tp, lambda comm: rows_of_steps(hf, names, comm, tp, calls[comm.rank]))
        seen.update(sum(calls, Counter()))
        return rows[0]

    parts, folded = Counter[str](), Counter[str]()
    for ours, theirs in zip(run((*WHOLE, *FOLDED), folded), run(WHOLE, parts), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)  # sums of float32 in another order
    layers, steps = 4, 4
    assert folded["add_norm_linear"] == tp * 2 * 2 * (layers - 1)  # of two steps; the first layer has nothing to add
    assert folded["shared_down_add"] == tp * 3 * layers  # all but the last step
    assert parts["add_rms_norm"] - folded["add_rms_norm"] == folded["add_norm_linear"]
    assert parts["silu_mul"] - folded["silu_mul"] == folded["shared_down_add"]
    assert parts["shared_expert_add"] - folded["shared_expert_add"] == folded["shared_down_add"]
    products = folded["add_norm_linear"] + folded["shared_down_add"]
    assert parts["linear"] - folded["linear"] == products and parts["linear"] > tp * steps * layers
    assert not any(parts[name] for name in FOLDED)


def test_layers_that_are_told_to_show_their_parts_call_none_of_both(hf: nn.Module) -> None:
    def by_parts(model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, GatedAttention | GatedDeltaNet | SparseMoe):
                module.run_by_parts()

    seen = Counter[str]()
    rows_of_steps(hf, (*WHOLE, *FOLDED), SoloComm(), 1, seen, by_parts)
    assert not any(seen[name] for name in (*WHOLE, *FOLDED)) and seen["add_rms_norm"]


@pytest.mark.parametrize("arch", ["sm_90", "gfx942", "gfx950", "cpu"])
def test_kernels_that_no_gpu_has_run_are_bound_where_they_are_wished_for_alone(arch: str) -> None:
    assert all(provider_order(name, arch) == ("reference",) for name in FOLDED)
    assert all("triton" in OPS[name].providers for name in FOLDED)
