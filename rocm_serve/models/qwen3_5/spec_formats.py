"""In which form a Qwen3.5-family checkpoint stores its weights: block FP8 or plain, experts one by one or fused.

Pure, no torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol

from rocm_serve.models.qwen3_5.spec_facts import ModelFacts


class Formats(Protocol):
    """How a checkpoint stores what can be stored in more than one way; asked per tensor, never remembered."""

    @property
    def tied(self) -> bool:
        """Say whether lm_head is embed_tokens."""
        ...

    def fused(self, stem: str) -> bool:
        """Say whether `stem` (`...mlp.experts.gate_up_proj`) is one tensor of all experts."""
        ...

    def fp8(self, key: str) -> bool:
        """Say whether the weight tensor `key` is block FP8 with a scale."""
        ...


@dataclass(frozen=True, slots=True)
class ConfigFormats:
    """What the configuration alone promises: published files store FP8 experts one by one, BF16 ones fused."""

    facts: ModelFacts

    @property
    def tied(self) -> bool:
        return self.facts.tie_word_embeddings

    def fused(self, stem: str) -> bool:
        return not promised_fp8(self.facts, stem)

    def fp8(self, key: str) -> bool:
        return promised_fp8(self.facts, key)


def scale_key(key: str) -> str:
    """Name the scale tensor of a weight: `x.weight` has `x.weight_scale_inv`, `experts.down_proj` its own."""
    return key + "_scale_inv"


_FP8_LINEAR = re.compile(
    r"\.(self_attn\.[qkvo]_proj|linear_attn\.(in_proj_qkv|in_proj_z|out_proj)"
    r"|mlp(\.shared_expert|\.experts\.\d+)?\.(gate|up|down)_proj|mlp\.experts\.(gate_up|down)_proj)(\.weight)?"
)


def promised_fp8(facts: ModelFacts, key: str) -> bool:
    """Say whether the configuration promises that the weight tensor `key` is FP8.

    An entry of modules_to_not_convert excludes the module of that name and those below it, and every module whose
    name ends in it (`model.layers.0.self_attn`, `mlp.shared_expert.up_proj`).
    """
    quant = facts.quantization
    if quant is None or not _FP8_LINEAR.search(key):
        return False
    name = key.removesuffix(".weight")
    dot = name.find(".")
    while dot >= 0:  # without lists of words: the largest models have a hundred thousand keys a stage
        if name[:dot] in quant.not_converted or name[dot + 1 :] in quant.not_converted:
            return False
        dot = name.find(".", dot + 1)
    return name not in quant.not_converted
