"""Checkpoints in every published layout, loaded as the server loads them, against HF on the dequantised weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig, Qwen3_5TextConfig

from rocm_serve.checkpoint.ledger import stage_catalogue
from rocm_serve.checkpoint.load import load_stage
from rocm_serve.checkpoint.reader import CheckpointReader, read_config
from rocm_serve.checkpoint.synthetic import make_checkpoint
from rocm_serve.models.qwen3_5.spec import parse_config, stage_params
from rocm_serve.models.registry import build_model
from rocm_serve.ops.bind import bind_ops
from rocm_serve.parallel.comm import Comm, SoloComm, run_ranks
from rocm_serve.parallel.mesh import Mesh
from tests.models.harness import Pipeline, Stage, allowed, caches, decode, difference, hf_logits, prefill, text

LAYOUTS = {"text-bf16": "none", "text-fp8": "fp8", "vl-fp8": "bf16", "dense": "bf16"}


def dequantised(path: Path) -> dict[str, torch.Tensor]:
    """Read the language model's tensors in float32, FP8 ones multiplied out, experts stacked as HF stacks them."""
    raw: dict[str, torch.Tensor] = {}
    for shard in path.glob("*.safetensors"):
        raw |= load_file(shard)
    plain, experts = {}, {}
    for name, tensor in raw.items():
        if name.startswith(("mtp.", "model.visual.")) or name.endswith("_scale_inv"):
            continue
        wide = tensor.float()
        if f"{name}_scale_inv" in raw:
            scale = raw[f"{name}_scale_inv"].float()
            wide *= torch.kron(scale, torch.ones(128, 128))[: wide.shape[0], : wide.shape[1]]
        name = name.replace("model.language_model.", "model.")
        (experts if ".experts." in name and name.endswith(".weight") else plain)[name] = wide
    for prefix in {n.split(".experts.")[0] + ".experts" for n in experts}:
        count = len({n for n in experts if n.startswith(prefix) and "down_proj" in n})

        def stack(which: str, prefix: str = prefix, count: int = count) -> torch.Tensor:
            return torch.stack([experts[f"{prefix}.{e}.{which}_proj.weight"] for e in range(count)])

        plain[f"{prefix}.gate_up_proj"] = torch.cat((stack("gate"), stack("up")), dim=1)
        plain[f"{prefix}.down_proj"] = stack("down")
    return plain


def hf_of(path: Path) -> nn.Module:
    config: dict[str, Any] = json.loads((path / "config.json").read_text())
    moe = "Moe" in config["architectures"][0]
    values = config.get("text_config", config)
    values = {k: v for k, v in values.items() if k not in ("architectures", "quantization_config", "dtype")}
    made = (Qwen3_5MoeTextConfig if moe else Qwen3_5TextConfig)(**values)
    made._attn_implementation = made._experts_implementation = "eager"
    model = (Qwen3_5MoeForCausalLM if moe else Qwen3_5ForCausalLM)(made).eval().float()
    model.load_state_dict(dequantised(path), strict=True)
    return model


def loaded(path: Path, mesh: Mesh, rank: int, comm: Comm, activation: Any = None) -> Stage:
    facts = parse_config(*read_config(path))
    coord = mesh.coord(rank)
    with CheckpointReader(path) as reader:
        formats = stage_catalogue(reader, facts, coord, mtp=False)
        params = stage_params(facts, coord, formats=formats, mtp=False)
        ops = bind_ops({}, "cpu", activation=activation)
        model = build_model(facts, coord, params, comm, ops, device="cpu", dtype=torch.float32, mtp=False)
        load_stage(reader, facts, coord, params, dict(model.named_parameters()), lambda news: None)
    model.prepare()
    return Stage(model, caches(facts, coord))


@dataclass(frozen=True)
class Case:
    """A checkpoint, a text, HF's logits of all its rows, and the bar of parity."""

    layout: str
    path: Path
    tokens: list[int]
    expected: torch.Tensor
    bar: float


def logits(run: Pipeline, tokens: list[int]) -> torch.Tensor:
    t = text()
    return torch.cat([prefill(run, t, tokens[:70]), decode(run, t, tokens[70:])])


@pytest.fixture(scope="module", params=LAYOUTS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    path = tmp_path_factory.mktemp(request.param)
    make_checkpoint(path, request.param, LAYOUTS[request.param], seed=1, layers=4)
    tokens = torch.randint(0, 2048, (76,), generator=torch.Generator().manual_seed(2)).tolist()
    hf = hf_of(path)
    return Case(request.param, path, tokens, hf_logits(hf, tokens), allowed(hf, tokens))


def test_log_probs_equal_hf_on_one_and_on_two_stages(case: Case) -> None:
    path, tokens = case.path, case.tokens
    one = Pipeline([loaded(path, Mesh(1, 1), 0, SoloComm())])
    two = Pipeline([loaded(path, Mesh(1, 2), r, SoloComm()) for r in range(2)])
    got = logits(one, tokens)
    assert difference(got, case.expected) <= case.bar
    assert torch.equal(logits(two, tokens), got)


@pytest.mark.parametrize("tp", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_log_probs_equal_hf_on_several_ranks(case: Case, tp: int) -> None:
    path, tokens = case.path, case.tokens
    shards = run_ranks(tp, lambda comm: logits(Pipeline([loaded(path, Mesh(tp, 1), comm.rank, comm)]), tokens))
    assert difference(torch.cat(shards, dim=-1), case.expected) <= case.bar


def test_quantised_rows_move_log_probs_a_little_and_only_where_weights_are_fp8(
    case: Case,
) -> None:
    plain, rounded = (
        prefill(Pipeline([loaded(case.path, Mesh(1, 1), 0, SoloComm(), how)]), text(), case.tokens[:20]).log_softmax(-1)
        for how in ("bf16", "fp8_1x128")
    )
    if not case.layout.endswith("fp8"):
        assert torch.equal(plain, rounded)
        return
    moved = (plain - rounded).square().mean(-1).sqrt().median()
    assert 1e-4 < moved < 0.5
