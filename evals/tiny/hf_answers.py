"""What an independent answer by HF Transformers rests on: the weights in HF's class, and lm-eval's two filters.

Nothing of the server is imported. The weights are dequantised here: FP8 times the scale of each 128 x 128 block.
evals/references/hf_reference.py asks the questions.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig

_STRICT = re.compile(r"#### (\-?[0-9\.\,]+)")
_FLEXIBLE = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")


def load(path: Path, device: str) -> Qwen3_5MoeForCausalLM:
    """Load a text-FP8 checkpoint into HF's class in float32; every parameter must be there."""
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    values = {k: v for k, v in config.items() if k not in ("architectures", "quantization_config", "dtype")}
    made = Qwen3_5MoeTextConfig(**values)
    made._experts_implementation = "eager"
    model = Qwen3_5MoeForCausalLM(made).float()
    model.load_state_dict(weights(path, made.num_experts), strict=True)
    return model.eval().to(device)


def weights(path: Path, experts: int) -> dict[str, Tensor]:
    """Read HF's parameters from the published tensors: scales multiplied in, experts stacked, no MTP."""
    stored: dict[str, Tensor] = {}
    for shard in sorted(path.glob("*.safetensors")):
        with safe_open(shard, framework="pt") as file:
            stored |= {name: file.get_tensor(name) for name in file.keys() if not name.startswith("mtp.")}  # noqa: SIM118
    wide: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        if name.endswith("_scale_inv"):
            continue
        scale = stored.get(f"{name}_scale_inv")
        rows, columns = tensor.shape if scale is not None else (0, 0)
        block = torch.ones(128, 128)
        wide[name] = tensor.float() * (1.0 if scale is None else torch.kron(scale.float(), block)[:rows, :columns])
    found = {name: value for name, value in wide.items() if ".experts." not in name}
    for prefix in {name.partition(".experts.")[0] + ".experts" for name in wide if ".experts." in name}:
        each = [[wide[f"{prefix}.{e}.{x}_proj.weight"] for x in ("gate", "up", "down")] for e in range(experts)]
        found[f"{prefix}.gate_up_proj"] = torch.stack([torch.cat((gate, up)) for gate, up, _ in each])
        found[f"{prefix}.down_proj"] = torch.stack([down for _, _, down in each])
    return found


def verdicts(text: str, gold: str) -> dict[str, bool]:
    """Judge by lm-eval's two filters: the number behind the first `####`, and the last number of the text."""
    value = gold.rpartition("#### ")[2]
    strict, flexible = _STRICT.search(text), _FLEXIBLE.findall(text)
    last = next(g for g in flexible[-1] if g) if flexible else ""
    return {"strict": strict is not None and _plain(strict[1]) == value, "flexible": _plain(last) == value}


def _plain(number: str) -> str:
    return re.sub(r"[,$]|\.$", "", number)
