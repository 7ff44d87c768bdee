"""Layers over simulated ranks: what each rank holds adds up to the whole, through one collective."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from rocm_serve.layers.embedding import LMHead, VocabParallelEmbedding
from rocm_serve.layers.linear import Linear, RowParallelLinear
from rocm_serve.layers.mlp import GatedMLP
from rocm_serve.layers.moe import SparseMoe
from rocm_serve.layers.weights import FP8, Weights
from rocm_serve.models.qwen3_5.spec import ConfigFormats, stage_params
from rocm_serve.ops.bind import BoundOps, bind_ops
from rocm_serve.parallel.comm import Comm, CountingComm, SoloComm, run_ranks
from rocm_serve.parallel.layout import Band, Param, Place, Split, copies
from rocm_serve.parallel.mesh import Mesh
from tests.models.harness import MOE_SIZES, facts_of, hf_model, random_tokens

OPS = bind_ops({}, "cpu")


def params_of(model: nn.Module, prefix: str) -> dict[str, Param]:
    facts = facts_of(model)
    table = stage_params(facts, Mesh(1, 1).coord(0), formats=ConfigFormats(facts), mtp=False)
    return {name: param for name, param in table.items() if name.startswith(prefix)}


def on_ranks(
    model: nn.Module, prefix: str, tp: int, build: Callable[[Weights, BoundOps, Comm], nn.Module]
) -> Callable[..., list[tuple[torch.Tensor, dict[str, int]]]]:
    """Build a layer on each rank, filled from HF's tensors; return a function that runs all of them."""
    params, tensors = params_of(model, prefix), model.state_dict()

    def run(*inputs: object) -> list[tuple[torch.Tensor, dict[str, int]]]:
        def rank(comm: Comm) -> tuple[torch.Tensor, dict[str, int]]:
            counting = CountingComm(comm)
            weights = Weights(params, Place(tp, comm.rank), torch.float32, torch.device("cpu"), prefix)
            layer = build(weights, OPS, counting)
            for name, p in layer.named_parameters():
                param = params[f"{prefix}.{name}"]
                for copy in copies(param, Place(tp, comm.rank)):
                    share = p.data[copy.dst]
                    share.copy_(tensors[copy.key][copy.src].view(share.shape))
            return layer(*inputs), dict(counting.calls)

        return run_ranks(tp, rank)

    return run


@pytest.fixture(scope="module")
def moe() -> nn.Module:
    return hf_model(seed=6, num_hidden_layers=1)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_embedding_is_exact_on_any_number_of_ranks(moe: nn.Module, tp: int) -> None:
    ids = torch.tensor([0, 159, *random_tokens(30, 1)])
    run = on_ranks(moe, "model.embed_tokens", tp, lambda w, ops, comm: VocabParallelEmbedding(w, comm))
    for rows, calls in run(ids):
        assert torch.equal(rows, moe.model.embed_tokens.weight[ids])
        assert calls == ({} if tp == 1 else {"all_reduce": 1})


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_logits_of_the_ranks_stand_side_by_side_in_float32_without_a_collective(moe: nn.Module, tp: int) -> None:
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(2))
    ranks = on_ranks(moe, "lm_head", tp, lambda w, ops, comm: LMHead(w, ops))(x)
    whole = torch.cat([logits for logits, _ in ranks], dim=-1)
    torch.testing.assert_close(whole, x @ moe.lm_head.weight.T, rtol=1e-5, atol=1e-5)
    assert all(calls == {} for _, calls in ranks)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_moe_joins_routed_and_shared_halves_before_its_one_all_reduce(moe: nn.Module, tp: int) -> None:
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(3))
    top_k = MOE_SIZES["num_experts_per_tok"]
    run = on_ranks(
        moe, "model.layers.0.mlp", tp, lambda w, ops, comm: SparseMoe(w, ops, comm, top_k=top_k, renormalise=True)
    )
    with torch.inference_mode():
        expected = moe.model.layers[0].mlp(x[None])[0]
    for y, calls in run(x, 32):
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
        assert calls == {"all_reduce": 1}


def test_rows_beyond_the_real_ones_reach_no_expert(moe: nn.Module) -> None:
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(4))
    build = lambda w, ops, comm: SparseMoe(w, ops, comm, top_k=3, renormalise=True)  # noqa: E731
    run = on_ranks(moe, "model.layers.0.mlp", 1, build)
    ((some, _),), ((every, _),) = run(x, 20), run(x, 32)
    assert torch.equal(some[:20], every[:20])
    assert not torch.equal(some[20:], every[20:])


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_dense_mlp_equals_hf_with_one_all_reduce(tp: int) -> None:
    model = hf_model(moe=False, seed=7, num_hidden_layers=1)
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(5))
    with torch.inference_mode():
        expected = model.model.layers[0].mlp(x)
    for y, calls in on_ranks(model, "model.layers.0.mlp", tp, GatedMLP)(x, 32):
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
        assert calls == {"all_reduce": 1}


def table(dtype: str, split: Split | None) -> dict[str, Param]:
    """A [256, 512] weight cut along its columns, with scales when it is FP8."""
    weight = Param("o.weight", dtype, ((Band(256),), (Band(512, split),)), ())
    scale = Param("o.weight_scale_inv", "float32", ((Band(2),), (Band(4, split),)), ())
    return {"o.weight": weight} | ({"o.weight_scale_inv": scale} if dtype == "fp8" else {})


def test_a_layer_is_fp8_exactly_when_the_table_says_so() -> None:
    for dtype, stored in (("model", torch.bfloat16), ("fp8", FP8)):
        weights = Weights(table(dtype, None), Place(), torch.bfloat16, torch.device("cpu"), "o")
        layer = Linear(weights, OPS)
        assert layer.weight.dtype == stored
        assert (layer.weight_scale_inv is not None) == (dtype == "fp8")


@pytest.mark.parametrize("activation", ["bf16", "fp8_1x128"])
def test_fp8_columns_cut_at_blocks_add_up_to_the_whole_product(activation: str) -> None:
    g = torch.Generator().manual_seed(8)
    w, scale = torch.randn(256, 512, generator=g).to(FP8), torch.rand(2, 4, generator=g)
    x = torch.randn(32, 512, generator=g)
    params, ops = table("fp8", Split(4, "blocks")), bind_ops({}, "cpu", activation=activation)  # type: ignore[arg-type]

    def product(comm: Comm) -> torch.Tensor:
        weights = Weights(params, Place(comm.size, comm.rank), torch.float32, torch.device("cpu"), "o")
        layer = RowParallelLinear(weights, ops, comm)
        width, blocks = 512 // comm.size, 4 // comm.size
        columns = slice(comm.rank * width, (comm.rank + 1) * width)
        layer.weight.data = w[:, columns]
        assert layer.weight_scale_inv is not None
        layer.weight_scale_inv.data = scale[:, comm.rank * blocks : (comm.rank + 1) * blocks]
        return layer(x[:, columns])

    alone = product(SoloComm())
    for tp in (2, 4):
        ranks = run_ranks(tp, product)
        assert all(torch.equal(r, ranks[0]) for r in ranks)
        torch.testing.assert_close(ranks[0], alone, rtol=1e-4, atol=1e-3)
