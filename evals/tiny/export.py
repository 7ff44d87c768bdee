"""From a trained model to the checkpoint's files and back. The files are the project's writer's, with values put in."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3_5MoeForCausalLM

from evals.tiny.modules import MtpHead
from evals.tiny.shape import LAYOUT, MTP
from rocm_serve.checkpoint.fp8 import dequantise, quantise
from rocm_serve.checkpoint.synthetic import write_model
from rocm_serve.checkpoint.synthetic_configs import Dims

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_FUSED = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)$")
_SINGLE = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight$")


def named(model: Qwen3_5MoeForCausalLM, mtp: MtpHead) -> list[tuple[str, torch.nn.Parameter]]:
    """List every parameter of both under its checkpoint name (experts fused, as HF holds them)."""
    return [*model.named_parameters(), *((f"mtp.{name}", p) for name, p in mtp.named_parameters())]


def published(masters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Turn float32 masters into the tensors of the files: experts one by one in block FP8, the rest BF16."""
    tensors: dict[str, Tensor] = {}
    for name, value in masters.items():
        match = _FUSED.match(name)
        if match is None:
            tensors[name] = value.bfloat16()
            continue
        for e, expert in enumerate(value):
            parts = (
                {"down": expert} if match[2] == "down_proj" else dict(zip(("gate", "up"), expert.chunk(2), strict=True))
            )
            for part, weight in parts.items():
                key = f"{match[1]}.{e}.{part}_proj.weight"
                tensors[key], tensors[f"{key}_scale_inv"] = quantise(weight)
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def write(out: Path, tensors: Mapping[str, Tensor], dims: Dims, tokenizer: Path) -> None:
    """Write a whole checkpoint: the project's writer makes every file, then values and tokenizer are replaced.

    Errors: AssertionError when names, shapes or dtypes are not those of the writer.
    """
    out.mkdir(parents=True, exist_ok=True)
    learnt = {name: (tokenizer / name).read_bytes() for name in TOKENIZER_FILES}  # `tokenizer` may be `out`
    for stale in out.glob("model-*.safetensors"):
        stale.unlink()
    write_model(out, LAYOUT, MTP, dims, 0)
    left = set(tensors)
    for shard in sorted(out.glob("model-*.safetensors")):
        made = load_file(shard)
        for name, tensor in made.items():
            value = tensors[name]
            assert (value.shape, value.dtype) == (tensor.shape, tensor.dtype), f"{name} is not as the writer has it"
            left.remove(name)
        save_file({name: tensors[name] for name in made}, shard, metadata={"format": "pt"})
        shard.chmod(0o644)
    assert not left, f"the writer has no place for {sorted(left)[:3]}"
    for name, content in learnt.items():
        (out / name).write_bytes(content)


def values(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return float32 values under HF's names: FP8 times scale, experts stacked."""
    found: dict[str, Tensor] = {}
    experts: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        if name.endswith("_scale_inv"):
            continue
        match = _SINGLE.match(name)
        if match is None:
            found[name] = tensor.float()
            continue
        weight = dequantise(tensor, tensors[f"{name}_scale_inv"])
        experts.setdefault(f"{match[1]}.{match[3]}_proj", {})[int(match[2])] = weight
    stacked = {name: torch.stack([those[e] for e in sorted(those)]) for name, those in experts.items()}
    for name, value in stacked.items():
        prefix, _, part = name.rpartition(".")
        if part == "down_proj":
            found[name] = value
        elif part == "gate_proj":
            found[f"{prefix}.gate_up_proj"] = torch.cat((value, stacked[f"{prefix}.up_proj"]), 1)
    return found


def fill(model: Qwen3_5MoeForCausalLM, mtp: MtpHead, tensors: Mapping[str, Tensor]) -> None:
    """Give both models the values of published tensors, every parameter once."""
    found = values(tensors)
    with torch.no_grad():
        for name, p in named(model, mtp):
            p.copy_(found.pop(name))
    assert not found, f"no parameter for {sorted(found)[:3]}"


def read(path: Path) -> dict[str, Tensor]:
    """Read all tensors of a checkpoint folder."""
    return {name: t for shard in sorted(path.glob("model-*.safetensors")) for name, t in load_file(shard).items()}
