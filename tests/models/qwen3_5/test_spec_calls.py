"""The table of which layer calls which op, held against models that run, with every op counted by layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from rocm_serve.cache.allocate import allocate_stage_cache
from rocm_serve.cache.layout import stage_layout
from rocm_serve.checkpoint.synthetic_configs import Dims, Layout, SpecialIds, model_config
from rocm_serve.layers.moe import ExpertWiring
from rocm_serve.models.qwen3_5.spec import ConfigFormats, ModelFacts, parse_config, stage_params
from rocm_serve.models.qwen3_5.spec_calls import calls_of
from rocm_serve.models.registry import build_model
from rocm_serve.ops.bind import OPS, BoundOps, bind_ops
from rocm_serve.ops.contract import Provider
from rocm_serve.ops.replay import replay_of
from rocm_serve.parallel.comm import SoloComm
from rocm_serve.parallel.exchange.contract import ExchangeSpec
from rocm_serve.parallel.exchange.make import make_exchange
from rocm_serve.parallel.expert_map import ExpertPlan
from rocm_serve.parallel.mesh import Mesh
from tests.models.harness import Chunk, make_batch, text

DIMS = Dims(
    hidden=128,
    layers=5,
    heads=2,
    kv_heads=1,
    key_heads=1,
    value_heads=2,
    experts=4,
    top_k=2,
    expert_width=128,
    shared_width=128,
    dense_width=128,
    vocabulary=64,
    max_position=512,
)
WHOLE = tuple(name for name, op in OPS.items() if op.parts)
FOLDED = ("add_norm_linear", "shared_down_add")
SENDING = ExpertPlan(shared_whole=True)
Seen = set[tuple[int, str]]


def facts_of(layout: Layout, plain: Sequence[str] | None = None) -> ModelFacts:
    """`plain`: the modules that are not FP8, in the place of the layout's own."""
    config = model_config(layout, "bf16", DIMS, SpecialIds(1, 2, 3, 4, 5, 6))
    if plain is not None:
        fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
        config["quantization_config"] = fp8 | {"modules_to_not_convert": list(plain)}
    return parse_config(config, None)


def counting(kernels: Sequence[str], activation: Any, seen: Seen) -> BoundOps:
    """Bind references, some as kernels would be; note the layer of every call, by the way of `--op layers.N.OP`."""
    ops = bind_ops({}, "cpu", activation=activation)

    def noting(layer: int, name: str) -> Any:
        def call(*args: Any, **scalars: Any) -> Any:
            seen.add((layer, name))
            return OPS[name].reference(*args, **scalars)

        return call

    def bound(layer: int) -> dict[str, Any]:
        functions = {name: noting(layer, name) for name in OPS}
        kernel = {name: Provider("kernel", lambda name=name: functions[name]) for name in kernels}
        return {name: ({**ops.providers, **kernel}[name], functions[name]) for name in OPS}

    return replace(ops, at_layer={layer: bound(layer) for layer in range(DIMS.layers)})


def wiring_of(facts: ModelFacts, fp8_rows: bool) -> ExpertWiring:
    """Have rows sent to their experts, which are on the only rank."""
    spec = ExchangeSpec(
        "all_gather", 1, facts.num_experts, facts.top_k, facts.hidden_size, 64, torch.float32, fp8_rows=fp8_rows
    )
    exchange = make_exchange(spec, SoloComm(), row_multiple=32)
    return ExpertWiring(SENDING, dict.fromkeys(range(facts.num_layers), exchange))


def run(facts: ModelFacts, pp: int, kernels: Sequence[str], *, drafts: bool, sends: bool, fp8_rows: bool) -> Seen:
    """Run a step of two prompts, one that decodes both, and with `drafts` one that verifies some."""
    seen: Seen = set()
    ops, most = counting(kernels, "fp8_1x128" if fp8_rows else "bf16", seen), 2 if drafts else 0
    formats, plan = ConfigFormats(facts), SENDING if sends else ExpertPlan()
    wiring = wiring_of(facts, fp8_rows and facts.quantization is not None) if sends else None
    stages = []
    for rank in range(pp):
        coord = Mesh(1, pp).coord(rank)
        params = stage_params(facts, coord, formats=formats, mtp=False, experts=plan)
        model = build_model(
            facts, coord, params, SoloComm(), ops, device="cpu", dtype=torch.float32, mtp=False, experts=wiring
        )
        for parameter in model.parameters():
            parameter.data = torch.zeros(parameter.shape).to(parameter.dtype)
        model.prepare()
        layout = stage_layout(facts, coord, 16, most)
        kinds = {"kv_dtype": torch.float32, "conv_dtype": torch.float32}
        stages.append(
            (model, allocate_stage_cache(layout, num_pages=8, num_slots=2, device=torch.device("cpu"), **kinds))
        )
    a, b = text(1, 4), text(2, 4)
    steps = [((a, [5, 6], False), (b, [9], False)), ((a, [7], True), (b, [3], True))]
    for step in [*steps, ((a, [8, 4], True), (b, [1], True))][: 2 + drafts]:
        chunks = [Chunk(*chunk) for chunk in step]
        tried = [len(chunk.tokens) - 1 if chunk.recurrent else 0 for chunk in chunks]
        stream = None
        for model, cache in stages:
            batch = make_batch(chunks, cache, 16)
            n = batch.num_rows  # without padding: what a norm is part of takes few rows
            few = {"token_ids_T": batch.token_ids_T[:n], "positions_T": batch.positions_T[:n]}
            batch = replace(batch, **few, replay=replay_of(batch.sequences, [0, 0], tried, most))
            with torch.inference_mode():
                stream = model.forward(batch, stream)
        for chunk in chunks:
            chunk.text.cached += len(chunk.tokens)
    return seen


@pytest.mark.parametrize(
    ("facts", "pp", "launch"),
    [
        (facts_of("text-bf16"), 2, {"drafts": True, "sends": False, "fp8_rows": False}),
        (facts_of("text-bf16"), 1, {"drafts": False, "sends": True, "fp8_rows": True}),
        (facts_of("text-fp8"), 1, {"drafts": False, "sends": True, "fp8_rows": True}),
        (facts_of("text-fp8"), 1, {"drafts": False, "sends": True, "fp8_rows": False}),
        (facts_of("dense"), 5, {"drafts": False, "sends": False, "fp8_rows": False}),
        (facts_of("dense", ()), 1, {"drafts": True, "sends": False, "fp8_rows": True}),
        (
            facts_of("dense", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "model.layers.4.mlp")),
            1,
            {"drafts": False, "sends": False, "fp8_rows": True},
        ),
    ],
    ids=("moe", "moe-sends", "moe-fp8-sends", "moe-fp8-sends-bf16", "dense", "dense-fp8", "dense-fp8-in-part"),
)
def test_a_layer_calls_what_the_table_says(facts: ModelFacts, pp: int, launch: dict[str, bool]) -> None:
    """By parts, with a kernel for each op that does the work of others, and with those that join products as well."""
    seen: Seen = set()
    for kernels in ((), WHOLE, tuple(name for name in WHOLE if name not in FOLDED)):
        seen |= run(facts, pp, kernels, **launch)
    calls = calls_of(facts, pp, draft_sends=False, **launch)
    table = {(layer, name) for layer, names in enumerate(calls.by_layer) for name in names}
    assert seen == table
