"""A model is recognised from its own JSON; a value that the server cannot honour is refused by name."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest

from rocm_serve.checkpoint.synthetic_configs import DIMS, SpecialIds, generation_config, model_config
from rocm_serve.errors import UserError
from rocm_serve.models.qwen3_5.spec import ModelFacts, parse_config
from tests.checkpoint import published

IDS = SpecialIds(endoftext=100, im_end=102, image=112, video=113, vision_start=109, vision_end=110)


def config(layout: Any = "text-fp8") -> dict[str, Any]:
    made = model_config(layout, "bf16" if layout in ("dense", "text-bf16") else "fp8", DIMS["default"], IDS)
    return copy.deepcopy(made)


def test_the_2_4t_config_has_42_keys_and_is_read() -> None:
    assert len(published.config()) == 42
    facts = parse_config(published.config(), published.generation_config())
    assert (facts.hidden_size, facts.num_layers, facts.num_heads, facts.num_kv_heads) == (8192, 92, 64, 4)
    assert (facts.num_experts, facts.top_k, facts.moe_intermediate_size) == (512, 10, 2048)
    assert (facts.rotary_dim, facts.rope.theta, facts.rope.yarn) == (64, 1e7, None)
    assert facts.layer_types.count("full_attention") == 23
    assert [i for i, kind in enumerate(facts.layer_types) if kind == "full_attention"][:2] == [3, 7]
    assert facts.gate_activation == "silu"
    assert facts.renormalise_top_k and facts.attn_output_gate and not facts.tie_word_embeddings
    assert facts.eos_token_ids == (248046, 248044)
    assert facts.max_position == 262144
    assert facts.mtp_layers == 1
    assert facts.quantization is not None and len(facts.quantization.not_converted) == 978


@pytest.mark.parametrize("layout", ["text-fp8", "text-bf16"])
def test_every_layout_of_one_size_gives_the_same_facts_but_for_its_format(layout: str) -> None:
    import dataclasses

    def plain(facts: ModelFacts) -> ModelFacts:
        return dataclasses.replace(facts, quantization=None, architecture="")

    vl = parse_config(config("vl-fp8"), generation_config(IDS))
    assert plain(parse_config(config(layout), generation_config(IDS))) == plain(vl)
    assert vl.architecture == "Qwen3_5MoeForConditionalGeneration"


def test_a_dense_config_has_no_experts() -> None:
    facts = parse_config(config("dense"), generation_config(IDS))
    assert not facts.is_moe
    assert facts.intermediate_size == 1024


def test_layer_types_follow_the_interval_when_they_are_not_listed() -> None:
    wish = config()
    del wish["layer_types"]
    wish["full_attention_interval"] = 3
    facts = parse_config(wish)
    assert [kind[0] for kind in facts.layer_types] == list("llfllfll")


def test_exclusion_names_lose_their_language_model_prefix() -> None:
    quant = parse_config(config("vl-fp8")).quantization
    assert quant is not None
    assert "model.layers.0.linear_attn.in_proj_a" in quant.not_converted
    assert not any("language_model" in name for name in quant.not_converted)


def test_yarn_stretches_the_context_and_scales_attention() -> None:
    wish = config()
    wish["rope_parameters"] |= {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16384}
    facts = parse_config(wish)
    assert facts.max_position == 65536
    assert facts.rope.yarn is not None
    assert facts.rope.yarn.attention_factor == pytest.approx(0.1 * math.log(4.0) + 1.0)
    assert (facts.rope.yarn.beta_fast, facts.rope.yarn.beta_slow, facts.rope.yarn.truncate) == (32.0, 1.0, True)


def test_yarn_parameters_equal_transformers_own() -> None:
    from transformers import Qwen3_5MoeTextConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for extra in ({}, {"mscale": 0.7, "mscale_all_dim": 1.3}, {"attention_factor": 1.7}):
        wish = config()
        wish["rope_parameters"] |= {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16384}
        wish["rope_parameters"] |= extra
        _, theirs = ROPE_INIT_FUNCTIONS["yarn"](Qwen3_5MoeTextConfig(**wish), "cpu")
        yarn = parse_config(wish).rope.yarn
        assert yarn is not None and yarn.attention_factor == pytest.approx(theirs)


def test_end_ids_are_the_union_of_both_files() -> None:
    assert parse_config(config()).eos_token_ids == (100,)
    assert parse_config(config(), {"eos_token_id": [102, 100]}).eos_token_ids == (102, 100)
    assert parse_config(config(), {"eos_token_id": 102}).eos_token_ids == (102, 100)


def test_rope_theta_outside_rope_parameters_is_found() -> None:
    wish = config()
    del wish["rope_parameters"]
    wish["rope_theta"] = 5000.0
    facts = parse_config(wish)
    assert facts.rope.theta == 5000.0
    assert facts.rotary_dim == 32


MISSING = ["hidden_size", "num_hidden_layers", "head_dim", "num_experts", "vocab_size", "rms_norm_eps"]


@pytest.mark.parametrize("key", MISSING)
@pytest.mark.parametrize("layout", ["text-fp8", "vl-fp8"])
def test_a_missing_key_is_named(key: str, layout: str) -> None:
    wish = config(layout)
    del wish.get("text_config", wish)[key]
    with pytest.raises(UserError, match=f"{key} is missing; legal: "):
        parse_config(wish)


@pytest.mark.parametrize("layout", ["text-fp8", "vl-fp8", "dense"])
def test_a_missing_rope_theta_is_never_guessed(layout: str) -> None:
    wish = config(layout)
    del wish.get("text_config", wish)["rope_parameters"]["rope_theta"]
    with pytest.raises(UserError, match="rope_theta is missing"):
        parse_config(wish)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["LlamaForCausalLM"]}, "architectures is .*legal: one of Qwen3_5MoeForCausalLM"),
    ({"architectures": None}, "architectures is None"),
    ({"model_type": "qwen3_next"}, "model_type is 'qwen3_next'; legal: qwen3_5_moe_text"),
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; legal: silu"),
    ({"attention_bias": True}, "attention_bias is True; legal: False"),
    ({"attn_output_gate": False}, "attn_output_gate is False; legal: True"),
    ({"output_gate_type": "tanh"}, "output_gate_type is 'tanh'; legal: null, silu, swish, sigmoid"),
    ({"mlp_only_layers": [3]}, r"mlp_only_layers is \[3\]; legal: an empty list"),
    ({"decoder_sparse_step": 2}, "decoder_sparse_step is 2"),
    ({"use_sliding_window": True}, "use_sliding_window is True"),
    ({"hidden_size": "256"}, "hidden_size is '256'; legal: a whole number"),
    ({"hidden_size": True}, "hidden_size is True"),
    ({"num_hidden_layers": 0}, r"num_hidden_layers is 0; legal: a whole number, 1\.\.10000"),
    ({"num_hidden_layers": 10**15, "layer_types": None}, "num_hidden_layers is 10+; legal: a whole number"),
    ({"max_position_embeddings": 10**15}, "max_position_embeddings is 10+; legal: a whole number"),
    ({"hidden_size": 10**30}, "hidden_size is 10+; legal: a whole number"),
    (
        {
            "rope_parameters": {
                "rope_theta": 1e7,
                "rope_type": "yarn",
                "factor": 1e300,
                "original_max_position_embeddings": 4096,
            }
        },
        r"yarn factor 1e\+300 stretches to .* positions; legal: up to",
    ),
    ({"rms_norm_eps": 0}, "rms_norm_eps is 0; legal: a number above 0"),
    ({"layer_types": ["linear_attention"]}, r"layer_types is not a list of 8 \(num_hidden_layers\) values out of"),
    ({"layer_types": ["sliding_attention"] * 8}, "out of linear_attention, full_attention"),
    ({"num_experts_per_tok": 9}, r"num_experts_per_tok is 9; legal: 1\.\.8"),
    ({"num_key_value_heads": 3}, "num_attention_heads 16 is not a multiple of num_key_value_heads 3"),
    ({"linear_num_key_heads": 5}, "linear_num_value_heads 32 is not a multiple of linear_num_key_heads 5"),
    ({"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers is 2; legal: 0, 1"),
    ({"mamba_ssm_dtype": "float16"}, "mamba_ssm_dtype is 'float16'; legal: float32, bfloat16"),
    ({"dtype": "float16"}, "dtype is 'float16'; legal: bfloat16, float32"),
    ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no'; legal: true, false"),
    ({"eos_token_id": None}, "eos_token_id is missing"),
    ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'; legal: a token id"),
    ({"eos_token_id": 5000}, r"eos_token_id \[5000\] reaches beyond vocab_size 2048"),
    ({"rope_parameters": "default"}, "rope_parameters is 'default'; legal: an object"),
    ({"rope_parameters": {"rope_theta": 1e7, "rope_type": "llama3"}}, "rope_type is 'llama3'; legal: default, yarn"),
    ({"rope_parameters": {"rope_theta": 1e7, "rope_type": "yarn"}}, "factor is missing"),
    ({"rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 2.0}}, r"legal: an even number in 2\.\.128"),
    ({"quantization_config": {"quant_method": "awq"}}, "quant_method is 'awq'; legal: fp8"),
    ({"quantization_config": {"quant_method": "fp8"}}, r"weight_block_size is missing; legal: \[128, 128\]"),
    (
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}},
        r"weight_block_size is \[64, 64\]; legal: \[128, 128\]",
    ),
    (
        {
            "quantization_config": {
                "quant_method": "fp8",
                "weight_block_size": [128, 128],
                "activation_scheme": "static",
            }
        },
        "activation_scheme is 'static'; legal: dynamic",
    ),
]


@pytest.mark.parametrize(("change", "said"), REFUSED, ids=[next(iter(c)) + str(i) for i, (c, _) in enumerate(REFUSED)])
def test_a_value_that_cannot_be_honoured_is_refused_by_name_in_one_line(change: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        parse_config(config() | change)
    assert "\n" not in str(caught.value)
