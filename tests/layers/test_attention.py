"""Gated attention where qk_norm_rope_kv_write is bound: the bits of its parts, and rows that are padding."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import Any

import pytest
import torch

from rocm_serve.layers.attention import GatedAttention
from rocm_serve.layers.rotary import rotary_table
from rocm_serve.layers.weights import Weights
from rocm_serve.models.qwen3_5.spec import ConfigFormats, ModelFacts, stage_params
from rocm_serve.ops.batch import ForwardBatch, StageCache
from rocm_serve.ops.bind import OPS, BoundOps, bind_ops
from rocm_serve.ops.contract import Provider
from rocm_serve.ops.inputs import normal, sequences_of
from rocm_serve.parallel.comm import SoloComm
from rocm_serve.parallel.layout import Place
from rocm_serve.parallel.mesh import Mesh
from tests.layers.replaying import facts_of
from tests.ops.poison import poisoned

PARTS = bind_ops({}, "cpu")
LAYER = 3  # the first one with full attention
PADDING = 3
G = torch.Generator


def at_once(calls: list[int]) -> BoundOps:
    """Bind the reference of qk_norm_rope_kv_write as a kernel would be; note how many rows it is called with."""

    def qk_norm_rope_kv_write(qkv_TC: torch.Tensor, *arguments: Any, **scalars: Any) -> torch.Tensor:
        calls.append(len(qkv_TC))
        return OPS["qk_norm_rope_kv_write"].reference(qkv_TC, *arguments, **scalars)

    bound = {**PARTS.providers, "qk_norm_rope_kv_write": Provider("kernel", lambda: qk_norm_rope_kv_write)}
    return replace(PARTS, qk_norm_rope_kv_write=qk_norm_rope_kv_write, providers=bound)


def layer_of(facts: ModelFacts, ops: BoundOps, seed: int) -> GatedAttention:
    params = stage_params(facts, Mesh(1, 1).coord(0), formats=ConfigFormats(facts), mtp=False)
    weights = Weights(params, Place(), torch.float32, torch.device("cpu"), f"model.layers.{LAYER}.self_attn")
    layer = GatedAttention(
        weights,
        ops,
        SoloComm(),
        cache_key=LAYER,
        num_heads=facts.num_heads,
        num_kv_heads=facts.num_kv_heads,
        head_dim=facts.head_dim,
        eps=facts.rms_norm_eps,
        rotary=rotary_table(rotary_dim=8, theta=1e4, yarn=None, max_position=200, device=torch.device("cpu")),
    )
    g = G().manual_seed(seed)
    for p in layer.parameters():
        p.data.copy_(normal(g, *p.shape, scale=p.shape[-1] ** -0.5))
    return layer


def step_of(facts: ModelFacts, seed: int) -> tuple[torch.Tensor, ForwardBatch]:
    """Two sequences past their prompt, the second a padded one of a captured batch, and a prompt; padding rows."""
    g = G().manual_seed(seed)
    sequences, pages = sequences_of(g, (1, 1, 7), (33, 0, 5), page_size=4)
    sequences = replace(sequences, num_recurrent=2)
    n = sequences.num_rows
    positions = [c + i for c, rows in ((33, 1), (0, 1), (5, 7)) for i in range(rows)]
    owner = [0, 1, *[2] * 7]
    index = [int(sequences.page_table_BP[b, p // 4]) * 4 + p % 4 for b, p in zip(owner, positions, strict=True)]
    index[1] = -1
    held = [normal(g, pages, 4, facts.num_kv_heads, facts.head_dim) for _ in range(2)]
    cache = StageCache(4, {LAYER: held[0]}, {LAYER: held[1]}, {}, {})
    rows = torch.tensor(positions + [0] * PADDING)
    batch = ForwardBatch(torch.zeros_like(rows), rows, torch.tensor(index), sequences, cache)
    return normal(g, n + PADDING, facts.hidden_size), batch


@pytest.mark.parametrize("by_parts", [True, False])
def test_one_op_has_the_bits_of_its_parts_and_is_left_alone_when_told_so(by_parts: bool) -> None:
    seed = secrets.randbits(31)
    facts = facts_of(16, 16)
    calls: list[int] = []
    results = []
    for ops in (PARTS, at_once(calls)):
        layer = layer_of(facts, ops, seed)
        if by_parts:
            layer.run_by_parts()
        x_TH, batch = step_of(facts, seed)
        with torch.inference_mode():
            y_TH = layer(x_TH, batch)
        results.append((y_TH, batch.cache.k_pages[LAYER], batch.cache.v_pages[LAYER]))
    assert calls == ([] if by_parts else [len(x_TH)])
    for parts, whole in zip(*results, strict=True):
        assert torch.equal(parts, whole), f"seed {seed}"


def test_a_row_without_a_place_writes_no_key_and_padding_rows_hold_no_leftovers() -> None:
    seed = secrets.randbits(31)
    facts = facts_of(16, 16)
    x_TH, batch = step_of(facts, seed)
    before = [batch.cache.k_pages[LAYER].clone(), batch.cache.v_pages[LAYER].clone()]
    with torch.inference_mode(), poisoned():
        y_TH = layer_of(facts, PARTS, seed)(x_TH, batch)
    assert y_TH.isfinite().all(), f"seed {seed}"
    for old, pages in zip(before, (batch.cache.k_pages[LAYER], batch.cache.v_pages[LAYER]), strict=True):
        changed = (old != pages).flatten(2).any(-1).flatten().nonzero().flatten().tolist()
        assert changed == sorted(i for i in batch.kv_index_N.tolist() if i >= 0), f"seed {seed}"
