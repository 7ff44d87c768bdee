"""The text path of vision-language checkpoints.

Their language tensors are renamed when they are read (`model.language_model.` is `model.` here) and the vision tower
is left out, so these are the text models under the name that the configuration gives them.
"""

from __future__ import annotations

from rocm_serve.models.qwen3_5.causal_lm import Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM


class Qwen3_5ForConditionalGeneration(Qwen3_5ForCausalLM):
    """The dense vision-language model, text in and text out."""


class Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeForCausalLM):
    """The mixture-of-experts vision-language model, text in and text out."""
