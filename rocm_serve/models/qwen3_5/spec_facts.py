"""What a Qwen3.5-family config.json says, checked: ModelFacts and parse_config. Pure, no torch.

The model is recognised from its own JSON, whether or not the installed transformers knows the class: flat text
configs (Qwen3.8-2.4T), configs with a `text_config` (vision-language checkpoints), MoE and dense.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar, cast

from rocm_serve.errors import UserError

LayerType = Literal["linear_attention", "full_attention"]
Json = Mapping[str, object]
_T = TypeVar("_T")
_LANGUAGE = "model.language_model."
_MOST = (
    1 << 27
)  # of any size, count or position: a hundred times what is published; memory is asked for by such numbers
_MOST_LAYERS = 10_000

MOE_ARCHITECTURES = ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration")
DENSE_ARCHITECTURES = ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration")


@dataclass(frozen=True, slots=True)
class Yarn:
    """Static YaRN: stretched inverse frequencies, cos and sin multiplied by `attention_factor`."""

    factor: float
    original_max_position: int
    beta_fast: float
    beta_slow: float
    attention_factor: float
    truncate: bool


@dataclass(frozen=True, slots=True)
class Rope:
    theta: float
    yarn: Yarn | None = None


@dataclass(frozen=True, slots=True)
class Quantization:
    """Block FP8: W = fp8 * scale per `block` (rows, columns); `not_converted` are canonical module names."""

    block: tuple[int, int]
    not_converted: frozenset[str]


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Everything that the server knows about a model before it reads a weight."""

    architecture: str
    hidden_size: int
    num_layers: int
    layer_types: tuple[LayerType, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    rope: Rope
    rms_norm_eps: float
    vocab_size: int  # rows of embed_tokens and lm_head, used or not
    tie_word_embeddings: bool
    attn_output_gate: bool
    gate_activation: Literal["silu", "sigmoid"]  # of the GDN output gate
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    conv_kernel: int
    num_experts: int  # 0: dense MLP
    top_k: int
    moe_intermediate_size: int
    shared_intermediate_size: int
    intermediate_size: int  # of the dense MLP; 0 in MoE models
    renormalise_top_k: bool
    mtp_layers: int
    max_position: int
    ssm_dtype: Literal["float32", "bfloat16"]
    dtype: Literal["bfloat16", "float32"]  # that the checkpoint asks to be run in
    eos_token_ids: tuple[int, ...]
    quantization: Quantization | None

    @property
    def is_moe(self) -> bool:
        return self.num_experts > 0

    @property
    def key_dim(self) -> int:
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_dim(self) -> int:
        return self.linear_num_value_heads * self.linear_value_head_dim


def canonical(name: str) -> str:
    """Strip the prefix that vision-language checkpoints put before the language model's names."""
    return "model." + name.removeprefix(_LANGUAGE) if name.startswith(_LANGUAGE) else name


class _Section:
    """Typed reads of one JSON object, with errors that name the key."""

    def __init__(self, values: Json, where: str = "config.json") -> None:
        self.values = values
        self.where = where

    def fail(self, key: str, legal: str) -> UserError:
        got = f"is {self.values[key]!r}" if key in self.values else "is missing"
        return UserError(f"{self.where}: {key} {got}; legal: {legal}")

    def integer(self, key: str, default: int | None = None, *, least: int = 1, most: int = _MOST) -> int:
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.fail(key, f"a whole number, {least}..{most}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise self.fail(key, "a number above 0")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fail(key, "true, false")
        return value

    def choice(self, key: str, legal: Mapping[object, _T], default: object) -> _T:
        value = self.values.get(key, default)
        if not isinstance(value, str | int | bool | None) or value not in legal:
            raise self.fail(key, ", ".join("null" if k is None else str(k) for k in legal))
        return legal[value]

    def section(self, key: str) -> Json | None:
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.fail(key, "an object")
        return cast(Json, value)


def parse_config(config: Json, generation_config: Json | None = None) -> ModelFacts:
    """Read a model's config.json (and generation_config.json) into facts.

    Errors: UserError naming the key and its legal values, for a missing, unknown or contradictory value.
    """
    root = _Section(config)
    architecture = _architecture(root)
    nested = root.section("text_config")
    text = root if nested is None else _Section(nested, "config.json text_config")
    _check_fixed_values(text)
    layers = text.integer("num_hidden_layers", most=_MOST_LAYERS)
    head_dim = text.integer("head_dim")
    rope, rotary_dim = _rope(text, head_dim)
    max_position = text.integer("max_position_embeddings")
    if rope.yarn is not None:
        stretched = rope.yarn.original_max_position * rope.yarn.factor
        if stretched > _MOST:
            raise UserError(
                f"{text.where}: yarn factor {rope.yarn.factor:g} stretches to {stretched:g} positions;"
                f" legal: up to {_MOST}"
            )
        max_position = max(max_position, int(stretched))
    moe = architecture in MOE_ARCHITECTURES
    facts = ModelFacts(
        architecture=architecture,
        hidden_size=text.integer("hidden_size"),
        num_layers=layers,
        layer_types=_layer_types(text, layers),
        num_heads=text.integer("num_attention_heads"),
        num_kv_heads=text.integer("num_key_value_heads"),
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        rope=rope,
        rms_norm_eps=text.number("rms_norm_eps"),
        vocab_size=text.integer("vocab_size"),
        tie_word_embeddings=(root if "tie_word_embeddings" in config else text).flag("tie_word_embeddings", False),
        attn_output_gate=text.choice("attn_output_gate", {True: True}, True),
        gate_activation=text.choice("output_gate_type", _GATES, None),
        linear_num_key_heads=text.integer("linear_num_key_heads"),
        linear_num_value_heads=text.integer("linear_num_value_heads"),
        linear_key_head_dim=text.integer("linear_key_head_dim"),
        linear_value_head_dim=text.integer("linear_value_head_dim"),
        conv_kernel=text.integer("linear_conv_kernel_dim", least=2),
        num_experts=text.integer("num_experts") if moe else 0,
        top_k=text.integer("num_experts_per_tok") if moe else 0,
        moe_intermediate_size=text.integer("moe_intermediate_size") if moe else 0,
        shared_intermediate_size=text.integer("shared_expert_intermediate_size") if moe else 0,
        intermediate_size=0 if moe else text.integer("intermediate_size"),
        renormalise_top_k=text.flag("norm_topk_prob", True),
        mtp_layers=text.integer("mtp_num_hidden_layers", 0, least=0),
        max_position=max_position,
        ssm_dtype=text.choice("mamba_ssm_dtype", _SSM_DTYPES, "float32"),
        dtype=_dtype(root, text),
        eos_token_ids=_eos(root, text, _Section(generation_config or {}, "generation_config.json")),
        quantization=_quantization(root),
    )
    _check_together(facts, text)
    return facts


_GATES: dict[object, Literal["silu", "sigmoid"]] = {None: "silu", "silu": "silu", "swish": "silu", "sigmoid": "sigmoid"}
_SSM_DTYPES: dict[object, Literal["float32", "bfloat16"]] = {"float32": "float32", "bfloat16": "bfloat16"}
_DTYPES: dict[object, Literal["bfloat16", "float32"]] = {"bfloat16": "bfloat16", "float32": "float32"}


def _architecture(root: _Section) -> str:
    legal = MOE_ARCHITECTURES + DENSE_ARCHITECTURES
    value = root.values.get("architectures")
    names = value if isinstance(value, Sequence) and not isinstance(value, str) else ()
    if len(names) != 1 or names[0] not in legal:
        raise root.fail("architectures", "one of " + ", ".join(legal))
    name = str(names[0])
    stem = "qwen3_5_moe" if name in MOE_ARCHITECTURES else "qwen3_5"
    nested = root.section("text_config")
    if nested is not None:
        root.choice("model_type", {stem: None, f"{stem}_text": None}, stem)
        root = _Section(nested, "config.json text_config")
    root.choice("model_type", {f"{stem}_text": None, stem: None}, f"{stem}_text")
    return name


def _check_fixed_values(text: _Section) -> None:
    text.choice("hidden_act", {"silu": None}, "silu")
    text.choice("attention_bias", {False: None}, False)
    text.choice("use_sliding_window", {False: None, None: None}, False)
    text.choice("decoder_sparse_step", {1: None, None: None}, 1)
    if text.values.get("mlp_only_layers"):
        raise text.fail("mlp_only_layers", "an empty list (every layer of this family is MoE)")


def _layer_types(text: _Section, layers: int) -> tuple[LayerType, ...]:
    legal = ("linear_attention", "full_attention")
    value = text.values.get("layer_types")
    if value is None:
        every = text.integer("full_attention_interval", 4)
        return tuple("full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(layers))
    ok = isinstance(value, Sequence) and len(value) == layers and all(kind in legal for kind in value)
    if not ok:
        wanted = f"a list of {layers} (num_hidden_layers) values out of {', '.join(legal)}"
        raise UserError(f"{text.where}: layer_types is not {wanted}")
    return tuple(cast(Sequence[LayerType], value))


def _rope(text: _Section, head_dim: int) -> tuple[Rope, int]:
    key = "rope_parameters" if text.values.get("rope_parameters") is not None else "rope_scaling"
    rope = _Section(text.section(key) or {}, f"{text.where} {key}")
    source = rope if "rope_theta" in rope.values else text
    if "rope_theta" not in source.values:
        raise UserError(f"{text.where}: rope_theta is missing in rope_parameters and outside; legal: a number above 0")
    theta = source.number("rope_theta")
    share = rope.number("partial_rotary_factor", text.number("partial_rotary_factor", 0.25))
    rotary_dim = int(head_dim * share)
    if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
        raise UserError(
            f"{text.where}: partial_rotary_factor {share} of head_dim {head_dim} is {rotary_dim} rotary dims;"
            f" legal: an even number in 2..{head_dim}"
        )
    kind_key = "type" if "type" in rope.values and "rope_type" not in rope.values else "rope_type"
    scaled = rope.choice(kind_key, {"default": False, "yarn": True}, "default")
    return Rope(theta, _yarn(rope) if scaled else None), rotary_dim


def _yarn(rope: _Section) -> Yarn:
    factor = rope.number("factor")
    mscale, all_dim = rope.values.get("mscale"), rope.values.get("mscale_all_dim")

    def gain(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    both = bool(mscale) and bool(all_dim)
    default = gain(rope.number("mscale")) / gain(rope.number("mscale_all_dim")) if both else gain(1.0)
    return Yarn(
        factor=factor,
        original_max_position=rope.integer("original_max_position_embeddings"),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        attention_factor=rope.number("attention_factor", default),
        truncate=rope.flag("truncate", True),
    )


def _dtype(root: _Section, text: _Section) -> Literal["bfloat16", "float32"]:
    for section in (text, root):
        for key in ("dtype", "torch_dtype"):
            if section.values.get(key) is not None:
                return section.choice(key, _DTYPES, None)
    return "bfloat16"


def _eos(*sections: _Section) -> tuple[int, ...]:
    """Return the union of every end-of-sequence id, generation_config's first."""
    ids: list[int] = []
    for section in reversed(sections):
        value = section.values.get("eos_token_id")
        for found in [] if value is None else value if isinstance(value, Sequence) else [value]:
            if isinstance(found, bool) or not isinstance(found, int) or found < 0:
                raise section.fail("eos_token_id", "a token id or a list of token ids")
            ids += [found] if found not in ids else []
    if not ids:
        raise UserError(
            "eos_token_id is missing in config.json and generation_config.json; legal: one or more token ids"
        )
    return tuple(ids)


def _quantization(root: _Section) -> Quantization | None:
    values = root.section("quantization_config")
    if values is None:
        return None
    quant = _Section(values, "config.json quantization_config")
    quant.choice("quant_method", {"fp8": None}, None)
    quant.choice("activation_scheme", {"dynamic": None}, "dynamic")
    quant.choice("fmt", {"e4m3": None, None: None}, None)
    quant.choice("weight_per_tensor", {False: None}, False)
    block = quant.values.get("weight_block_size")
    if not isinstance(block, Sequence) or list(block) != [128, 128]:
        raise quant.fail("weight_block_size", "[128, 128]")
    names = quant.values.get("modules_to_not_convert")
    if names is not None and (isinstance(names, str) or not isinstance(names, Sequence)):
        raise quant.fail("modules_to_not_convert", "a list of module names")
    return Quantization((128, 128), frozenset(canonical(str(name)) for name in names or ()))


def _check_together(facts: ModelFacts, text: _Section) -> None:
    """Refuse sizes that cannot belong to one model."""
    pairs = (
        ("num_attention_heads", facts.num_heads, "num_key_value_heads", facts.num_kv_heads),
        ("linear_num_value_heads", facts.linear_num_value_heads, "linear_num_key_heads", facts.linear_num_key_heads),
    )
    for name, many, of, few in pairs:
        if many % few:
            raise UserError(f"{text.where}: {name} {many} is not a multiple of {of} {few}")
    if facts.is_moe and facts.top_k > facts.num_experts:
        raise text.fail("num_experts_per_tok", f"1..{facts.num_experts} (num_experts)")
    if facts.mtp_layers > 1:
        raise text.fail("mtp_num_hidden_layers", "0, 1")
    if any(i >= facts.vocab_size for i in facts.eos_token_ids):
        raise UserError(f"eos_token_id {list(facts.eos_token_ids)} reaches beyond vocab_size {facts.vocab_size}")
