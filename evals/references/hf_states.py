"""Log-probs and inner results of HF Transformers on given ids, for `rocm-serve parity --b hf`.

    python evals/references/hf_states.py --question FILE --out DIR

Nothing of the server is imported. A checkpoint of any published layout is read here (FP8 times the scale of each
128 x 128 block) and run in float32 by HF's own class, one sequence at a time. Written to DIR: answer.json, with the
best ids of every position and HF's own difference between all at once and token by token; and, when the question
wishes for rows, taps/, in the form and under the names that the server's ranks use.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import (
    DynamicCache,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
)
from transformers.models.qwen3_5 import modeling_qwen3_5 as dense
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as moe


def load(path: Path) -> Any:
    """Load a checkpoint in float32; every parameter must be there."""
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    left_out = ("architectures", "quantization_config", "dtype", "torch_dtype")
    text = {k: v for k, v in config.get("text_config", config).items() if k not in left_out}
    tied = bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))
    text["tie_word_embeddings"] = False  # else the two are one parameter, and whichever is loaded last is both
    weights = plain_weights(path)
    if "num_experts" in text:
        made = Qwen3_5MoeTextConfig(**text)
        made._experts_implementation = "eager"
        model: Any = Qwen3_5MoeForCausalLM
        weights = fused_experts(weights)
    else:
        made, model = Qwen3_5TextConfig(**text), Qwen3_5ForCausalLM
    made._attn_implementation = "eager"
    built = model(made).float()
    if tied:  # HF's from_pretrained ties nothing where the files hold a head of other values
        weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])
    built.load_state_dict(weights, strict=True)
    return built.eval()


def plain_weights(path: Path) -> dict[str, Tensor]:
    """Read the text model's tensors under plain names, scales multiplied in."""
    stored: dict[str, Tensor] = {}
    for shard in sorted(path.glob("*.safetensors")):
        with safe_open(shard, framework="pt") as file:
            names = [name for name in file.keys() if not name.startswith(("mtp.", "model.visual."))]  # noqa: SIM118
            stored |= {name: file.get_tensor(name) for name in names}
    found: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        if name.endswith("_scale_inv"):
            continue
        value = tensor.float()
        scale = stored.get(f"{name}_scale_inv")
        if scale is not None:
            rows, columns = value.shape[-2:]
            wide = scale.float().repeat_interleave(128, -2).repeat_interleave(128, -1)
            value = value * wide[..., :rows, :columns]
        found[name.replace("model.language_model.", "model.")] = value
    return found


def fused_experts(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Stack the tensors of single experts as HF's class holds them."""
    found = {name: value for name, value in weights.items() if ".weight" not in name or ".experts." not in name}
    for prefix in {name.partition(".experts.")[0] for name in weights.keys() - found.keys()}:
        count = sum(name.startswith(f"{prefix}.experts.") for name in weights) // 3
        gate, up, down = (
            [weights[f"{prefix}.experts.{e}.{kind}_proj.weight"] for e in range(count)]
            for kind in ("gate", "up", "down")
        )
        pairs = [torch.cat(pair) for pair in zip(gate, up, strict=True)]
        found[f"{prefix}.experts.gate_up_proj"] = torch.stack(pairs)
        found[f"{prefix}.experts.down_proj"] = torch.stack(down)
    return found


@torch.inference_mode()
def log_probs(model: Any, ids: list[int], cache: DynamicCache | None = None) -> Tensor:
    """Return log-probs [T, V] in float64 from float32 logits."""
    logits = model(torch.tensor([ids]), cache=cache, use_cache=cache is not None).logits
    return torch.log_softmax(logits[0].double(), -1)


def stepwise(model: Any, ids: list[int]) -> Tensor:
    cache = DynamicCache(config=model.config)
    return torch.cat([log_probs(model, [token], cache) for token in ids])


class Recorder:
    """Keeps what modules return, under the server's names, for the wished rows of one sequence at a time."""

    def __init__(self, model: Any, wish: dict[str, Any]) -> None:
        self.rows = {int(seed): list(positions) for seed, positions in wish["rows"].items()}
        self.routed = {int(seed): below for seed, below in wish["routed"].items()}
        self.layers = model.config.num_hidden_layers
        self.seed = -1
        self.sites: list[dict[str, Any]] = []
        self.tensors: list[Tensor] = []
        self.parts: dict[str, Tensor] = {}
        for number, layer in enumerate(model.model.layers):
            self._layer(number, layer)
        model.model.norm.register_forward_hook(lambda _m, _i, out: self.keep(self.layers, "norm.rms_norm", out))

    def keep(self, layer: int, name: str, x: Tensor) -> None:
        """Keep rows of `x`, [T, F] or [1, T, F]."""
        self.keep_rows(layer, name, x.flatten(0, -2))

    def keep_rows(self, layer: int, name: str, values: Tensor) -> None:
        """Keep rows of [T, ...]."""
        if self.seed not in self.rows:
            return
        positions = self.rows[self.seed]
        if name in ("mlp.gate.linear", "mlp.moe_route"):
            positions = sorted({*range(self.routed[self.seed]), *positions})
        op = name.rpartition(".")[2] or name
        keys = [[self.seed, position] for position in positions]
        self.sites.append({"layer": layer, "name": name, "op": op, "keys": keys, "bands": [], "addend": False})
        self.tensors.append(values[positions].float().flatten(1).contiguous())

    def _layer(self, n: int, layer: nn.Module) -> None:
        layer.register_forward_pre_hook(lambda _m, args: self.keep(n, "stream_in", args[0]))
        self._after(layer, lambda out: self.keep(n, "stream_out", out[0] if isinstance(out, tuple) else out))
        norms = (
            ("input_layernorm", "input_layernorm.rms_norm"),
            ("post_attention_layernorm", "post_attention_layernorm.add_rms_norm"),
        )
        for name, site in norms:
            self._after(getattr(layer, name), lambda out, site=site: self.keep(n, site, out))
        layer.post_attention_layernorm.register_forward_pre_hook(
            lambda _m, args: self.keep(n, "post_attention_layernorm.add_rms_norm.stream", args[0])
        )
        if hasattr(layer, "linear_attn"):
            self._delta_net(n, layer.linear_attn)
        else:
            self._attention(n, layer.self_attn)
        if hasattr(layer.mlp, "experts"):
            self._moe(n, layer.mlp)
        else:
            self._mlp(n, "mlp", layer.mlp)

    @staticmethod
    def _after(module: nn.Module, record: Callable[[Any], None]) -> None:
        module.register_forward_hook(lambda _m, _i, out: record(out))

    def _gather(self, n: int, site: str, **modules: nn.Module) -> None:
        """Keep the outputs of several modules side by side, once all of them have run."""
        for part, module in modules.items():

            def record(out: Tensor, part: str = part) -> None:
                self.parts[f"{n}.{site}.{part}"] = out.flatten(0, -2)
                there = [self.parts.get(f"{n}.{site}.{name}") for name in modules]
                if all(one is not None for one in there):
                    self.keep(n, site, torch.cat([one for one in there if one is not None], -1))
                    for name in modules:
                        del self.parts[f"{n}.{site}.{name}"]

            self._after(module, record)

    def _delta_net(self, n: int, gdn: Any) -> None:
        self._gather(n, "linear_attn.in_proj_qkvz.linear", qkv=gdn.in_proj_qkv, z=gdn.in_proj_z)
        self._gather(n, "linear_attn.in_proj_ba.linear", b=gdn.in_proj_b, a=gdn.in_proj_a)

        def convolved(out: Tensor) -> None:
            weight = gdn.conv1d.weight
            padded = F.pad(out[0].T[None], (weight.shape[-1] - 1, 0))
            y = F.conv1d(padded, weight, groups=weight.shape[0])
            self.keep(n, "linear_attn.causal_conv", F.silu(y)[0].T)

        self._after(gdn.in_proj_qkv, convolved)
        heads = gdn.num_v_heads
        gdn.norm.register_forward_pre_hook(
            lambda _m, args: self.keep_rows(n, "linear_attn.gdn", args[0].view(-1, heads, gdn.head_v_dim))
        )
        self._after(
            gdn.norm,
            lambda out: self.keep(n, "linear_attn.norm.gated_rms_norm", out.view(-1, heads * gdn.head_v_dim)),
        )
        self._after(gdn.out_proj, lambda out: self._sum(n, "linear_attn.out_proj", out))

    def _attention(self, n: int, attention: Any) -> None:
        parts = {"q": attention.q_proj, "k": attention.k_proj, "v": attention.v_proj}
        self._gather(n, "self_attn.qkv_proj.linear", **parts)
        attention.o_proj.register_forward_pre_hook(lambda _m, args: self.keep(n, "self_attn.sigmoid_mul", args[0]))
        self._after(attention.o_proj, lambda out: self._sum(n, "self_attn.o_proj", out))

    def attended(self, module: Any, query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> None:
        """Keep what HF's attention function was given and what it returns: [1, heads, T, D] and [1, T, heads, D]."""
        n = module.layer_idx
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        self.keep_rows(n, "self_attn.qk_norm_rope.q", q)
        self.keep_rows(n, "self_attn.qk_norm_rope.k", k)
        self.keep_rows(n, "self_attn.kv_write.k", k)
        self.keep_rows(n, "self_attn.kv_write.v", v)
        self.keep_rows(n, "self_attn.attention", out[0])

    def _sum(self, n: int, module: str, out: Tensor) -> None:
        self.keep(n, f"{module}.linear", out)
        self.keep(n, f"{module}.all_reduce", out)

    def _mlp(self, n: int, name: str, mlp: Any) -> None:
        self._gather(n, f"{name}.gate_up_proj.linear", gate=mlp.gate_proj, up=mlp.up_proj)
        mlp.down_proj.register_forward_pre_hook(lambda _m, args: self.keep(n, f"{name}.silu_mul", args[0]))
        self._after(mlp.down_proj, lambda out: self._sum(n, f"{name}.down_proj", out))

    def _moe(self, n: int, block: Any) -> None:
        def routed(out: tuple[Tensor, Tensor, Tensor]) -> None:
            logits, weights, ids = out
            self.keep(n, "mlp.gate.linear", logits)
            self.keep(n, "mlp.moe_route", torch.zeros_like(logits).scatter_(-1, ids, weights))

        self._after(block.gate, routed)
        self._after(block.experts, lambda out: self.keep(n, "mlp.experts.moe_experts", out))
        self._mlp(n, "mlp.shared_expert", block.shared_expert)
        self._after(block.shared_expert, lambda out: self.parts.update({f"{n}.shared": out.flatten(0, -2)}))

        def gated(out: Tensor) -> None:
            self.keep(n, "mlp.shared_expert_gate.linear", out)
            self.keep(n, "mlp.sigmoid_mul", self.parts.pop(f"{n}.shared") * out.flatten(0, -2).sigmoid())

        self._after(block.shared_expert_gate, gated)
        self._after(block, lambda out: self.keep(n, "mlp.all_reduce", out[0] if isinstance(out, tuple) else out))

    def write(self, folder: Path) -> None:
        (folder / "taps").mkdir(exist_ok=True)
        header = json.dumps({"rank": 0, "tp_rank": 0, "tp": 1, "sites": self.sites})
        tensors = {str(i): tensor for i, tensor in enumerate(self.tensors)}
        save_file(tensors, folder / "taps" / "rank-0-step-000000.safetensors", metadata={"header": header})


def watch_attention(recorder: Recorder) -> None:
    """Have HF's eager attention report to the recorder."""
    for module in (dense, moe):
        plain = module.eager_attention_forward

        def watched(block: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, plain: Any = plain, **kw: Any):  # type: ignore[no-untyped-def]
            out = plain(block, query, key, value, *args, **kw)
            recorder.attended(block, query, key, value, out[0])
            return out

        module.eager_attention_forward = watched


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--question", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_float32_matmul_precision("highest")
    question = json.loads(args.question.read_text(encoding="utf-8"))
    model = load(Path(question["model"]))
    recorder = None
    if question["wish"] is not None:
        recorder = Recorder(model, question["wish"])
        watch_attention(recorder)
    noise: list[float] = []
    rows: list[list[dict[int, float]]] = []
    done, total = 0, sum(len(sequence["ids"]) for sequence in question["sequences"])
    for sequence in question["sequences"]:
        ids = sequence["ids"]
        if recorder is not None:
            recorder.seed = sequence["seed"]
        found = log_probs(model, ids)
        if recorder is not None:
            recorder.seed = -1
        noise.append((found - stepwise(model, ids)).abs().max().item() if recorder is None else 0.0)
        best = found[:-1, : question["vocab_used"]].topk(min(question["top"], question["vocab_used"]), -1)
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        rows.append(
            [
                dict(zip(top, values, strict=True)) | {target: row[target].item()}
                for (top, values), target, row in zip(pairs, ids[1:], found, strict=False)
            ]
        )
        done += len(ids)
        print(done, total, flush=True)  # tokens, for whoever waits
    if recorder is not None:
        recorder.write(args.out)
    (args.out / "answer.json").write_text(json.dumps({"noise": noise, "rows": rows}), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
