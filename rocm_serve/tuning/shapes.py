"""The models that are measured: configurations that the engine itself parses and builds. No torch.

"q38tp8" is one rank of Qwen3.8-2.4T-A95B under tensor parallelism of 8, alone: a model of one rank whose heads, widths
and vocabulary are that rank's share, and whose hidden size is the whole one. 8 of its 92 layers. "q35tp1" is the whole
text model of Qwen3.5-35B-A3B. Both as published in FP8: routed experts in blocks of 128 x 128, everything else bf16.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from rocm_serve.checkpoint.synthetic_configs import Dims, SpecialIds, model_config
from rocm_serve.models.qwen3_5.spec import ModelFacts, parse_config

_RANKS = 8
_IDS = SpecialIds(1, 2, 3, 4, 5, 6)
_VOCABULARY = 248320
LONGEST = 1 << 17  # positions that the rotary table holds

SHAPES: Mapping[str, Dims] = MappingProxyType(
    {
        "q35tp1": Dims(
            hidden=2048,
            layers=40,
            heads=16,
            kv_heads=2,
            head_dim=256,
            key_heads=16,
            value_heads=32,
            experts=256,
            top_k=8,
            expert_width=512,
            shared_width=512,
            vocabulary=_VOCABULARY,
            max_position=LONGEST,
        ),
        "q38tp8": Dims(
            hidden=8192,
            layers=8,
            heads=64 // _RANKS,
            kv_heads=1,  # 4 heads for 8 ranks: each is held twice
            head_dim=256,
            key_heads=16 // _RANKS,
            value_heads=128 // _RANKS,
            experts=512,
            top_k=10,
            expert_width=2048 // _RANKS,
            shared_width=2048 // _RANKS,
            vocabulary=_VOCABULARY // _RANKS,
            max_position=LONGEST,
        ),
        "tiny": Dims(  # for a CPU: the program itself is tried
            hidden=128,
            layers=4,
            heads=4,
            head_dim=64,
            key_heads=2,
            value_heads=4,
            gdn_head_dim=32,
            experts=8,
            top_k=2,
            expert_width=128,
            shared_width=128,
            vocabulary=512,
        ),
    }
)


def config_of(dims: Dims) -> dict[str, object]:
    """Return config.json as the published FP8 checkpoints have it."""
    return model_config("text-fp8", "none", dims, _IDS)


def facts_of(name: str) -> ModelFacts:
    """Parse a shape as the engine parses a checkpoint's configuration."""
    return parse_config(config_of(SHAPES[name]), None)
