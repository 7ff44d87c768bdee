"""The Qwen3.8-2.4T-A95B-FP8 repository, written out by hand: config.json, and names, dtypes, shapes of all tensors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

LAYERS = 92
EXPERTS = 512
SHARDS = 213

Entry = tuple[str, str, tuple[int, ...]]


def config() -> dict[str, object]:
    return {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "bos_token_id": 248044,
        "dtype": "bfloat16",
        "eos_token_id": 248044,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 8192,
        "initializer_range": 0.02,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 23,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 128,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "model_type": "qwen3_5_moe_text",
        "moe_intermediate_size": 2048,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": 64,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 10,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": 4,
        "output_gate_type": "swish",
        "output_router_logits": False,
        "pad_token_id": None,
        "partial_rotary_factor": 0.25,
        "quantization_config": {
            "act_per_tensor": False,
            "activation_scheme": "dynamic",
            "modules_to_not_convert": unconverted(),
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
            "weight_per_tensor": False,
        },
        "rms_norm_eps": 1e-06,
        "rope_parameters": {"partial_rotary_factor": 0.25, "rope_theta": 10000000, "rope_type": "default"},
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 2048,
        "tie_word_embeddings": False,
        "transformers_version": "4.57.3",
        "use_cache": True,
        "vocab_size": 248320,
    }


def generation_config() -> dict[str, object]:
    return {
        "bos_token_id": 248044,
        "do_sample": True,
        "eos_token_id": [248046, 248044],
        "pad_token_id": 248044,
        "temperature": 1.0,
        "top_k": 20,
        "top_p": 0.95,
    }


def unconverted() -> list[str]:
    names = ["lm_head", "model.embed_tokens"]
    for i in range(LAYERS):
        names += _unconverted(f"model.layers.{i}", full=i % 4 == 3)
    return [*names, "mtp.fc", *_unconverted("mtp.layers.0", full=True)]


def _unconverted(prefix: str, *, full: bool) -> list[str]:
    gdn = ["conv1d", "in_proj_a", "in_proj_b", "in_proj_qkv", "in_proj_z", "out_proj"]
    mixer = [f"self_attn.{x}_proj" for x in "qkvo"] if full else [f"linear_attn.{x}" for x in gdn]
    shared = [f"mlp.shared_expert.{x}_proj" for x in ("gate", "up", "down")]
    return [f"{prefix}.{x}" for x in (*mixer, "mlp.gate", *shared, "mlp.shared_expert_gate")]


def entries() -> Iterator[Entry]:
    """Yield all 287,119 tensors in the order of their layers."""
    yield from _bf16({"model.embed_tokens.weight": (248320, 8192), "lm_head.weight": (248320, 8192)})
    yield from _bf16({"model.norm.weight": (8192,)})
    for i in range(LAYERS):
        yield from _layer(f"model.layers.{i}.", full=i % 4 == 3)
    yield from _bf16({"mtp.fc.weight": (8192, 16384), "mtp.norm.weight": (8192,)})
    yield from _bf16({f"mtp.pre_fc_norm_{x}.weight": (8192,) for x in ("embedding", "hidden")})
    yield from _layer("mtp.layers.0.", full=True)


def _layer(prefix: str, *, full: bool) -> Iterator[Entry]:
    mixer = {
        "self_attn.q_proj.weight": (32768, 8192),
        "self_attn.k_proj.weight": (1024, 8192),
        "self_attn.v_proj.weight": (1024, 8192),
        "self_attn.o_proj.weight": (8192, 16384),
        "self_attn.q_norm.weight": (256,),
        "self_attn.k_norm.weight": (256,),
    }
    gdn = {
        "linear_attn.in_proj_qkv.weight": (20480, 8192),
        "linear_attn.in_proj_z.weight": (16384, 8192),
        "linear_attn.in_proj_b.weight": (128, 8192),
        "linear_attn.in_proj_a.weight": (128, 8192),
        "linear_attn.conv1d.weight": (20480, 1, 4),
        "linear_attn.A_log": (128,),
        "linear_attn.dt_bias": (128,),
        "linear_attn.norm.weight": (128,),
        "linear_attn.out_proj.weight": (8192, 16384),
    }
    rest = {
        "input_layernorm.weight": (8192,),
        "post_attention_layernorm.weight": (8192,),
        "mlp.gate.weight": (512, 8192),
        "mlp.shared_expert_gate.weight": (1, 8192),
        "mlp.shared_expert.gate_proj.weight": (2048, 8192),
        "mlp.shared_expert.up_proj.weight": (2048, 8192),
        "mlp.shared_expert.down_proj.weight": (8192, 2048),
    }
    shapes: dict[str, tuple[int, ...]] = {**(mixer if full else gdn), **rest}
    yield from _bf16({prefix + name: shape for name, shape in shapes.items()})
    for e in range(EXPERTS):
        for name, weight, scale in (
            ("gate", (2048, 8192), (16, 64)),
            ("up", (2048, 8192), (16, 64)),
            ("down", (8192, 2048), (64, 16)),
        ):
            stem = f"{prefix}mlp.experts.{e}.{name}_proj.weight"
            yield stem, "F8_E4M3", weight
            yield f"{stem}_scale_inv", "BF16", scale


def _bf16(shapes: dict[str, tuple[int, ...]]) -> Iterator[Entry]:
    for name, shape in shapes.items():
        yield name, "BF16", shape


def write_sparse(out: Path) -> int:
    """Write the repository with true headers and holes for data; return the bytes of the headers."""
    (out / "config.json").write_text(json.dumps(config()))
    (out / "generation_config.json").write_text(json.dumps(generation_config()))
    every = list(entries())
    weight_map: dict[str, str] = {}
    headers = 0
    for i in range(SHARDS):
        file = f"model-{i + 1:05d}-of-{SHARDS:05d}.safetensors"
        shard = every[len(every) * i // SHARDS : len(every) * (i + 1) // SHARDS]
        headers += write_holes(out / file, shard)
        weight_map |= dict.fromkeys((name for name, _, _ in shard), file)
    index = {"metadata": {"total_size": 2_496_066_252_544}, "weight_map": weight_map}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    return headers


def write_holes(path: Path, shard: list[Entry]) -> int:
    """Write a safetensors file whose data is one hole; return the bytes before the data."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, dtype, shape in shard:
        size = {"BF16": 2, "F8_E4M3": 1, "F32": 4}[dtype]
        for n in shape:
            size *= n
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + at)
    return 8 + len(text)
