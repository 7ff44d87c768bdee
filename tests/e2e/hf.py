"""The independent reference: HF Transformers in float32 on the same checkpoint.

Layouts that HF's class reads are loaded by it. FP8 and vision-language layouts are dequantised and renamed here, by
code that shares nothing with the server's loader.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, DynamicCache, Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

NEAR_TIE = 1e-4


@dataclass
class Decoded:
    """A greedy continuation, with the distances of the decisions behind each of its tokens."""

    tokens: list[int] = field(default_factory=list)
    log_probs: list[torch.Tensor] = field(default_factory=list)  # of each step, over all rows of lm_head
    gaps: list[float] = field(default_factory=list)  # best to second best logit of each token
    router_gaps: list[float] = field(default_factory=list)  # least k-th to next router logit in the row before it


class Reference:
    """One HF model, one sequence at a time."""

    def __init__(self, model: Any, vocab_used: int) -> None:
        self._model = model.eval()
        self._router_logits: list[torch.Tensor] = []
        self._noise: dict[tuple[int, ...], float] = {}
        self._top_k = getattr(model.config, "num_experts_per_tok", 0)
        self.vocab_used = vocab_used
        for name, module in model.named_modules():
            if name.endswith("mlp.gate"):
                module.register_forward_hook(lambda _module, _inputs, out: self._router_logits.append(out[0]))

    def one_shot(self, ids: Sequence[int]) -> torch.Tensor:
        """Return log-probs [T, V] of one causal prefill, in float64 from float32 logits."""
        return self._forward(ids, None)

    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """Return the raw logits [T, V] of one causal prefill, in float64."""
        return self._logits(ids, None)

    def stepwise(self, ids: Sequence[int]) -> torch.Tensor:
        """Return the same computed token by token with the cache."""
        cache = DynamicCache(config=self._model.config)
        return torch.cat([self._forward([token], cache) for token in ids])

    def noise(self, ids: Sequence[int]) -> float:
        """Return HF's own largest difference between one-shot and token-by-token on this prompt; computed once."""
        key = tuple(ids)
        if key not in self._noise:
            self._noise[key] = (self.one_shot(ids) - self.stepwise(ids)).abs().max().item()
        return self._noise[key]

    def router_gap(self, ids: Sequence[int]) -> float:
        """Return the least distance between a chosen and a rejected expert over all rows of a prefill."""
        self._forward(ids, None)
        return self._least_router_gap()

    def greedy(self, prompt: Sequence[int], count: int) -> Decoded:
        """Prefill once, then decode with the cache; ids that the tokenizer does not know are never taken."""
        cache = DynamicCache(config=self._model.config)
        decoded = Decoded()
        row = self._forward(prompt, cache)[-1]
        for _ in range(count):
            best = row[: self.vocab_used].topk(2)
            decoded.tokens.append(int(best.indices[0]))
            decoded.log_probs.append(row)
            decoded.gaps.append(float(best.values[0] - best.values[1]))
            decoded.router_gaps.append(self._least_router_gap(last_row=True))
            row = self._forward(decoded.tokens[-1:], cache)[-1]
        return decoded

    def _forward(self, ids: Sequence[int], cache: DynamicCache | None) -> torch.Tensor:
        return torch.log_softmax(self._logits(ids, cache), -1)

    @torch.inference_mode()
    def _logits(self, ids: Sequence[int], cache: DynamicCache | None) -> torch.Tensor:
        self._router_logits.clear()
        with _one_thread():
            logits = self._model(torch.tensor([list(ids)]), cache=cache, use_cache=cache is not None).logits
        return logits[0].double()

    def _least_router_gap(self, last_row: bool = False) -> float:
        gaps = [float("inf")]
        for logits in self._router_logits:
            best = (logits[-1:] if last_row else logits).topk(self._top_k + 1, -1).values
            gaps.append((best[:, -2] - best[:, -1]).min().item())
        return min(gaps)


def load(path: Path) -> Reference:
    """Load a checkpoint of any layout into HF's class, float32."""
    vocab_used = 1 + max(Tokenizer.from_file(str(path / "tokenizer.json")).get_vocab().values())
    config = json.loads((path / "config.json").read_text())
    if "quantization_config" not in config:
        return Reference(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), vocab_used)
    model = Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**_text_part(config))).float()
    model.load_state_dict(_fused_experts(_dequantised(path)), strict=True)
    return Reference(model, vocab_used)


def _text_part(config: dict[str, Any]) -> dict[str, Any]:
    text = config.get("text_config", config)
    return {key: value for key, value in text.items() if key not in ("quantization_config", "architectures")}


def _dequantised(path: Path) -> dict[str, torch.Tensor]:
    """Read every text tensor in float32 under the plain `model.` prefix; scales are multiplied in."""
    stored: dict[str, torch.Tensor] = {}
    for shard in sorted(path.glob("*.safetensors")):
        with safe_open(shard, framework="pt") as file:
            stored |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    found: dict[str, torch.Tensor] = {}
    for name, tensor in stored.items():
        if name.startswith(("mtp.", "model.visual.")) or name.endswith("_scale_inv"):
            continue
        value = tensor.float()
        if (scale := stored.get(f"{name}_scale_inv")) is not None:
            rows, columns = value.shape
            tile = torch.ones(128, 128)
            value = value * torch.kron(scale.float(), tile)[:rows, :columns]
        found[name.replace("model.language_model.", "model.")] = value
    return found


def _fused_experts(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Stack `experts.E.{gate,up,down}_proj.weight` into HF's 3-D `experts.gate_up_proj` and `experts.down_proj`."""
    fused = {name: value for name, value in weights.items() if ".experts." not in name}
    prefixes = sorted({name.split(".experts.")[0] for name in weights if ".experts." in name})
    for prefix in prefixes:
        count = sum(name.startswith(f"{prefix}.experts.") for name in weights) // 3
        gate, up, down = (
            [weights[f"{prefix}.experts.{e}.{kind}_proj.weight"] for e in range(count)]
            for kind in ("gate", "up", "down")
        )
        fused[f"{prefix}.experts.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in zip(gate, up, strict=True)])
        fused[f"{prefix}.experts.down_proj"] = torch.stack(down)
    return fused


@contextmanager
def _one_thread() -> Iterator[None]:
    """HF's token-by-token steps are tiny: threads cost more than they give, above all on shared cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
