"""Rotary tables against HF's own initialisation of the same configuration."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeTextRotaryEmbedding

from rocm_serve.layers.rotary import inverse_frequencies, rotary_table
from tests.models.harness import MOE_SIZES, SIZES, facts_of, hf_model

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"rope_type": "default"},
    "yarn": YARN,
    "other betas": YARN | {"beta_fast": 16.0, "beta_slow": 2.0},
    "attention factor": YARN | {"attention_factor": 1.5},
    "not truncated": YARN | {"truncate": False},
    "mscale": YARN | {"mscale": 0.7, "mscale_all_dim": 1.1},
}


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_cos_and_sin_equal_hf(kind: str, share: float) -> None:
    section = {"mrope_interleaved": True, "mrope_section": [2, 1, 1]}
    rope = {"rope_theta": 1e6, "partial_rotary_factor": share} | section | KINDS[kind]
    model = hf_model(rope=rope, head_dim=64, num_hidden_layers=1, layer_types=["full_attention"])
    facts = facts_of(model)
    config = Qwen3_5MoeTextConfig(**(SIZES | MOE_SIZES | {"head_dim": 64}), rope_parameters=dict(rope))
    theirs = Qwen3_5MoeTextRotaryEmbedding(config)
    positions = torch.tensor([0, 1, 2, 63, 500, 1000])
    cos, sin = theirs(torch.zeros(1), positions[None].expand(3, 1, -1))
    table = rotary_table(
        rotary_dim=facts.rotary_dim,
        theta=facts.rope.theta,
        yarn=facts.rope.yarn,
        max_position=1001,
        device=torch.device("cpu"),
    )
    half = facts.rotary_dim // 2
    assert table.cos_PR.shape == (1001, half)
    torch.testing.assert_close(table.cos_PR[positions], cos[0, :, :half], rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(table.sin_PR[positions], sin[0, :, :half], rtol=1e-5, atol=2e-5)


def test_frequencies_fall_from_one_by_a_fixed_ratio() -> None:
    got = inverse_frequencies(8, 1e4, None)
    torch.testing.assert_close(got, torch.tensor([1.0, 1e-1, 1e-2, 1e-3]))


def test_the_table_has_the_same_bits_on_any_number_of_threads() -> None:
    before, made = torch.get_num_threads(), []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        made.append(rotary_table(rotary_dim=32, theta=1e7, yarn=None, max_position=5000, device=torch.device("cpu")))
    torch.set_num_threads(before)
    assert all(torch.equal(t.cos_PR, made[0].cos_PR) and torch.equal(t.sin_PR, made[0].sin_PR) for t in made)
