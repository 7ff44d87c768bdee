"""The JSON files of the synthetic checkpoints: same keys and form as the published ones, small numbers. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from rocm_serve.errors import UserError

Layout = Literal["text-fp8", "text-bf16", "vl-fp8", "dense"]
MtpFormat = Literal["fp8", "bf16", "none"]
DimsName = Literal["default", "narrow"]
JsonObject = dict[str, object]


@dataclass(frozen=True, slots=True)
class Dims:
    """Sizes of the made-up model. Default: legal at tensor-parallel 1, 2 and 4 in every layout."""

    hidden: int = 256
    layers: int = 8
    heads: int = 16
    kv_heads: int = 2
    head_dim: int = 128
    key_heads: int = 4
    value_heads: int = 32
    gdn_head_dim: int = 128
    conv_kernel: int = 4
    experts: int = 8
    top_k: int = 3
    expert_width: int = 512
    shared_width: int = 1024
    dense_width: int = 1024
    vocabulary: int = 2048
    max_position: int = 16384


DIMS: Mapping[DimsName, Dims] = {
    "default": Dims(),
    "narrow": Dims(expert_width=128),  # one FP8 block per expert: refused above tensor-parallel 1
}


@dataclass(frozen=True, slots=True)
class SpecialIds:
    """Token ids that the configuration files name."""

    endoftext: int
    im_end: int
    image: int
    video: int
    vision_start: int
    vision_end: int


def check_wish(layout: str, mtp: str, dims: str) -> None:
    """Refuse a combination that no published checkpoint has.

    Errors: UserError with the legal values.
    """
    for name, value, legal in (("layout", layout, get_args(Layout)), ("dims", dims, get_args(DimsName))):
        if value not in legal:
            raise UserError(f"{name} {value!r} is unknown; legal: {', '.join(legal)}")
    formats = get_args(MtpFormat) if layout.endswith("fp8") else ("bf16", "none")
    if mtp not in formats:
        raise UserError(f"mtp {mtp!r} is not possible in layout {layout}; legal: {', '.join(formats)}")


def model_config(layout: Layout, mtp: MtpFormat, dims: Dims, ids: SpecialIds) -> JsonObject:
    """Write config.json: flat with 42 keys (text), with `text_config` (vl), flat dense."""
    text = _text_config(layout, mtp, dims, ids)
    if layout == "vl-fp8":
        config = _vl_config(text, dims, ids)
    else:
        name = "Qwen3_5ForCausalLM" if layout == "dense" else "Qwen3_5MoeForCausalLM"
        config = {"architectures": [name], **text}
    if layout.endswith("fp8"):
        config["quantization_config"] = {
            "activation_scheme": "dynamic",
            "act_per_tensor": False,
            "modules_to_not_convert": unconverted_modules(layout, mtp, dims),
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
            "weight_per_tensor": False,
        }
    return config


def generation_config(ids: SpecialIds) -> JsonObject:
    return {
        "bos_token_id": ids.endoftext,
        "do_sample": True,
        "eos_token_id": [ids.im_end, ids.endoftext],
        "pad_token_id": ids.endoftext,
        "temperature": 1.0,
        "top_k": 20,
        "top_p": 0.95,
        "transformers_version": "4.57.3",
    }


def layer_types(dims: Dims) -> list[str]:
    return ["full_attention" if (i + 1) % 4 == 0 else "linear_attention" for i in range(dims.layers)]


def _text_config(layout: Layout, mtp: MtpFormat, dims: Dims, ids: SpecialIds) -> JsonObject:
    moe: JsonObject = {
        "moe_intermediate_size": dims.expert_width,
        "num_experts": dims.experts,
        "num_experts_per_tok": dims.top_k,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": dims.shared_width,
    }
    dense: JsonObject = {"intermediate_size": dims.dense_width}
    rope: JsonObject = {"partial_rotary_factor": 0.25, "rope_theta": 10000000, "rope_type": "default"}
    config: JsonObject = {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "bos_token_id": ids.endoftext,
        "dtype": "bfloat16",
        "eos_token_id": ids.endoftext,
        "full_attention_interval": 4,
        "head_dim": dims.head_dim,
        "hidden_act": "silu",
        "hidden_size": dims.hidden,
        "initializer_range": 0.02,
        "layer_types": layer_types(dims),
        "linear_conv_kernel_dim": dims.conv_kernel,
        "linear_key_head_dim": dims.gdn_head_dim,
        "linear_num_key_heads": dims.key_heads,
        "linear_num_value_heads": dims.value_heads,
        "linear_value_head_dim": dims.gdn_head_dim,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": dims.max_position,
        "model_type": "qwen3_5_text" if layout == "dense" else "qwen3_5_moe_text",
        "mtp_num_hidden_layers": 0 if mtp == "none" else 1,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": dims.heads,
        "num_hidden_layers": dims.layers,
        "num_key_value_heads": dims.kv_heads,
        "output_gate_type": "swish",
        "pad_token_id": None,
        "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-6,
        "rope_parameters": rope,
        "tie_word_embeddings": False,
        "transformers_version": "4.57.3",
        "use_cache": True,
        "vocab_size": dims.vocabulary,
        **(dense if layout == "dense" else moe),
    }
    if layout == "vl-fp8":
        for key in ("output_gate_type", "partial_rotary_factor", "transformers_version"):
            del config[key]
        rope |= {"mrope_interleaved": True, "mrope_section": [6, 5, 5]}
        config["mlp_only_layers"] = []
    return config


def _vl_config(text: JsonObject, dims: Dims, ids: SpecialIds) -> JsonObject:
    return {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "image_token_id": ids.image,
        "model_type": "qwen3_5_moe",
        "text_config": text,
        "tie_word_embeddings": False,
        "transformers_version": "4.57.3",
        "video_token_id": ids.video,
        "vision_config": {
            "deepstack_visual_indexes": [],
            "depth": 2,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 64,
            "in_channels": 3,
            "initializer_range": 0.02,
            "intermediate_size": 128,
            "model_type": "qwen3_5_moe",
            "num_heads": 4,
            "num_position_embeddings": 64,
            "out_hidden_size": dims.hidden,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        "vision_end_token_id": ids.vision_end,
        "vision_start_token_id": ids.vision_start,
    }


def unconverted_modules(layout: Layout, mtp: MtpFormat, dims: Dims) -> list[str]:
    """List the linear modules that stay BF16, by the names that the published list uses."""
    prefix = "model.language_model." if layout == "vl-fp8" else "model."
    names = ["lm_head", f"{prefix}embed_tokens"]
    for i, kind in enumerate(layer_types(dims)):
        names += _unconverted_of_layer(f"{prefix}layers.{i}", kind, vl=layout == "vl-fp8")
    if layout == "vl-fp8":
        names += [f"model.visual.blocks.{i}.attn.{x}" for i in range(2) for x in ("qkv", "proj")]
        names += ["model.visual.merger.linear_fc1", "model.visual.merger.linear_fc2"]
    if mtp != "none":
        names.append("mtp.fc")
        names += _unconverted_of_layer("mtp.layers.0", "full_attention", vl=layout == "vl-fp8" and mtp == "fp8")
    if mtp == "bf16":
        names.append("mtp.layers.0.mlp.experts")
    return names


def _unconverted_of_layer(prefix: str, kind: str, *, vl: bool) -> list[str]:
    small = [f"{prefix}.mlp.gate", f"{prefix}.mlp.shared_expert_gate"]
    shared = [f"{prefix}.mlp.shared_expert.{x}_proj" for x in ("gate", "up", "down")]
    if kind == "full_attention":
        mixer, large = [], [f"{prefix}.self_attn.{x}_proj" for x in "qkvo"]
    else:
        mixer = [f"{prefix}.linear_attn.{x}" for x in ("conv1d", "in_proj_a", "in_proj_b")]
        large = [f"{prefix}.linear_attn.{x}" for x in ("in_proj_qkv", "in_proj_z", "out_proj")]
    return [*mixer, *small] if vl else [*mixer, *large, *small, *shared]
