"""The shape of the tiny checkpoint, as sizes for the project's writer. No torch.

Legal at tensor-parallel 1 and 2 (an expert is two FP8 blocks wide), at 4 for everything but the experts' columns, whose
eight experts then go by expert parallelism. Every trait of the large model is there: GDN to full attention 3:1, several
GDN value heads a key head, grouped queries, output gate, partial rotary embedding, shared expert, top-k above 1, MTP.
"""

from __future__ import annotations

from rocm_serve.checkpoint.synthetic_configs import Dims, JsonObject, SpecialIds, model_config

LAYOUT = "text-fp8"
MTP = "fp8"
DIMS = Dims(
    hidden=256,
    layers=8,
    heads=4,
    kv_heads=2,
    head_dim=64,
    key_heads=4,
    value_heads=8,
    gdn_head_dim=128,
    experts=8,
    top_k=2,
    expert_width=256,
    shared_width=128,
    vocabulary=1024,
    max_position=4096,
)


def text_config(dims: Dims, ids: SpecialIds) -> JsonObject:
    """The model's own part of config.json: what HF's Qwen3_5MoeTextConfig takes."""
    config = model_config(LAYOUT, MTP, dims, ids)
    return {key: value for key, value in config.items() if key not in ("architectures", "quantization_config")}
