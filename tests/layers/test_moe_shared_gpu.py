"""The shared expert beside the routed ones on a GPU, in a captured graph. Run by hand where a GPU is."""

from __future__ import annotations

import secrets

import pytest
import torch

from rocm_serve.layers.beside import side_stream
from rocm_serve.layers.moe import SparseMoe
from rocm_serve.layers.weights import Weights
from rocm_serve.ops.bind import OPS, bind_ops
from rocm_serve.parallel.comm import SoloComm
from rocm_serve.parallel.layout import Place
from tests.layers.test_parallel import params_of
from tests.models.harness import hf_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]
MOE = ("linear", "silu_mul", "moe_route", "moe_experts", "shared_expert_add")
PREFIX = "model.layers.0.mlp"


def layer_of(g: torch.Generator) -> SparseMoe:
    ops = bind_ops({name: "triton" if name in MOE else "reference" for name in OPS}, "sm_90")
    params = params_of(hf_model(seed=16, num_hidden_layers=1), PREFIX)
    weights = Weights(params, Place(), torch.bfloat16, torch.device("cuda"), PREFIX)
    layer = SparseMoe(weights, ops, SoloComm(), top_k=3, renormalise=True)
    for p in layer.parameters():
        p.data.copy_(torch.randn(p.shape, generator=g) * p.shape[-1] ** -0.5)
    return layer


def test_beside_or_after_the_routed_experts_rows_have_the_same_bits() -> None:
    seed = secrets.randbits(31)
    print(f"seed {seed}")
    g = torch.Generator().manual_seed(seed)
    layer = layer_of(g)
    x_TH = torch.empty(32, 64, dtype=torch.bfloat16, device="cuda")
    inputs = [torch.randn(32, 64, generator=g).to(torch.bfloat16) for _ in range(20)]
    after = []
    for x in inputs:
        x_TH.copy_(x)
        after.append(layer(x_TH, 32))
    side = torch.cuda.Stream()
    with side_stream(side):
        layer(x_TH, 32)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out_TH = layer(x_TH, 32)
    for x, expected in zip(inputs, after, strict=True):
        x_TH.copy_(x)
        graph.replay()
        assert torch.equal(out_TH, expected)
        with side_stream(side):
            assert torch.equal(layer(x_TH, 32), expected)
