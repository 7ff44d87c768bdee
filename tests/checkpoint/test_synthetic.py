"""Synthetic checkpoints have the published form, the same bytes for a seed, and Transformers reads them as they are."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rocm_serve.checkpoint import synthetic
from rocm_serve.checkpoint.fp8 import dequantise
from rocm_serve.checkpoint.initial import draw
from rocm_serve.checkpoint.reader import CheckpointReader, read_config
from rocm_serve.checkpoint.synthetic import make_checkpoint
from rocm_serve.errors import UserError
from rocm_serve.models.qwen3_5.spec import parse_config
from tests.checkpoint import published
from tests.checkpoint.holes import headers_of
from tests.made import LAYOUTS

ACCEPTED = "ignore:.*:DeprecationWarning", "ignore:.*:FutureWarning", "ignore:.*:UserWarning"  # of transformers


def digests(path: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(path.iterdir())}


def pattern(name: str) -> str:
    return re.sub(r"\.\d+\.", ".N.", re.sub(r"\.\d+\.", ".N.", name))


def test_the_2_4t_layout_has_the_published_keys_names_dtypes_and_exclusions(checkpoints: dict[str, Path]) -> None:
    config, generation = read_config(checkpoints["text-fp8"])
    assert config.keys() == published.config().keys()
    assert generation is not None and published.generation_config().keys() <= generation.keys()
    ours = {(pattern(name), dtype, len(shape)) for name, (dtype, shape) in headers_of(checkpoints["text-fp8"]).items()}
    theirs = {(pattern(name), dtype, len(shape)) for name, dtype, shape in published.entries()}
    assert ours == theirs
    excluded: Any = config["quantization_config"]
    names = {pattern(f"{name}.") for name in excluded["modules_to_not_convert"]}
    assert names == {pattern(f"{name}.") for name in published.unconverted()}


def test_the_bf16_layout_has_fused_experts_without_a_suffix_and_no_fp8(checkpoints: dict[str, Path]) -> None:
    headers = headers_of(checkpoints["text-bf16"])
    assert {dtype for dtype, _ in headers.values()} == {"BF16"}
    assert headers["model.layers.0.mlp.experts.gate_up_proj"][1] == (8, 1024, 256)
    assert headers["mtp.layers.0.mlp.experts.down_proj"][1] == (8, 256, 512)
    assert sum(name.startswith("mtp.") for name in headers) == 19
    per_layer = [sum(name.startswith(f"model.layers.{i}.") for name in headers) for i in range(4)]
    assert per_layer == [18, 18, 18, 15]
    config, _ = read_config(checkpoints["text-bf16"])
    assert "quantization_config" not in config


def test_the_vl_layout_has_prefixes_a_text_config_more_fp8_and_some_float32(checkpoints: dict[str, Path]) -> None:
    headers = headers_of(checkpoints["vl-fp8"])
    config, _ = read_config(checkpoints["vl-fp8"])
    assert "hidden_size" not in config and isinstance(config["text_config"], dict)
    assert "quantization_config" in config and "quantization_config" not in config["text_config"]
    tops = {
        name.split(".layers.")[0].split(".blocks.")[0] for name in headers if ".layers." in name or ".blocks." in name
    }
    assert tops == {"model.language_model", "model.visual", "mtp"}
    fp8 = {pattern(name) for name, (dtype, _) in headers.items() if dtype == "F8_E4M3"}
    layer = "model.language_model.layers.N."
    experts = {f"mlp.{e}{x}_proj.weight" for e in ("experts.N.", "shared_expert.") for x in ("gate", "up", "down")}
    attention = {f"self_attn.{x}_proj.weight" for x in "qkvo"}
    gdn = {f"linear_attn.{x}.weight" for x in ("in_proj_qkv", "in_proj_z", "out_proj")}
    mtp = {f"mtp.layers.N.{x}" for x in experts | attention}
    assert fp8 == {layer + x for x in experts | attention | gdn} | mtp
    f32 = {pattern(name) for name, (dtype, _) in headers.items() if dtype == "F32"}
    assert f32 == {f"{layer}linear_attn.A_log", f"{layer}linear_attn.norm.weight"}


def test_a_bf16_draft_layer_beside_fp8_experts_is_excluded_by_name(checkpoints: dict[str, Path]) -> None:
    headers = headers_of(checkpoints["text-fp8-mtp-bf16"])
    assert {dtype for name, (dtype, _) in headers.items() if name.startswith("mtp.")} == {"BF16"}
    assert "mtp.layers.0.mlp.experts.gate_up_proj" in headers


@pytest.mark.parametrize("name", LAYOUTS)
def test_weights_lie_in_several_shards_with_an_index_and_all_sizes_add_up(
    checkpoints: dict[str, Path], name: str
) -> None:
    path = checkpoints[name]
    index = json.loads((path / "model.safetensors.index.json").read_text())
    sizes = [(path / file).stat().st_size for file in set(index["weight_map"].values())]
    assert len(sizes) > 1 and max(sizes) < 13e6
    reader = CheckpointReader(path)
    assert index["metadata"]["total_size"] == sum(reader.info(n).nbytes for n in reader.names)
    assert sum(file.stat().st_size for file in path.iterdir()) < 100e6


@pytest.mark.parametrize("name", LAYOUTS)
def test_no_vector_sits_at_its_initial_value_and_no_weight_saturates(checkpoints: dict[str, Path], name: str) -> None:
    tensors: dict[str, torch.Tensor] = {}
    for file in checkpoints[name].glob("*.safetensors"):
        tensors |= load_file(file)
    for key, tensor in tensors.items():
        if "visual" in key or key.endswith("_scale_inv"):
            continue
        value = tensor.float()
        if tensor.dtype is torch.float8_e4m3fn:
            value = dequantise(tensor, tensors[f"{key}_scale_inv"])
        wanted = draw(key, tuple(tensor.shape))
        assert value.isfinite().all()
        some = value.flatten()[:512]
        assert some.unique().numel() > 0.05 * some.numel(), key
        assert value.mean().item() == pytest.approx(wanted.mean, abs=5 * wanted.std / value.numel() ** 0.5 + 1e-3), key
        if value.numel() > 1000:
            assert value.std().item() == pytest.approx(wanted.std, rel=0.05), key
        if value.dim() == 1:
            initial = {"norm.weight": 1.0 if "linear_attn" in key else 0.0}.get(key.rpartition("linear_attn.")[2], 0.0)
            assert (value - initial).abs().mean() > 0.05, key


def test_the_same_seed_writes_the_same_bytes_in_another_process(tmp_path: Path) -> None:
    first = digests(make_checkpoint(tmp_path / "a", "text-fp8", "fp8", seed=3, layers=4))
    code = (
        "import sys; from rocm_serve.checkpoint.synthetic import make_checkpoint;"
        "make_checkpoint(sys.argv[1], 'text-fp8', 'fp8', seed=3, layers=4)"
    )
    environment = {"PYTHONHASHSEED": "77", "OMP_NUM_THREADS": "2", "PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "b")], check=True, env=environment)
    assert digests(tmp_path / "b") == first
    other = digests(make_checkpoint(tmp_path / "a", "text-fp8", "fp8", seed=4, layers=4))
    assert other.keys() == first.keys()
    weights = [name for name in first if name.endswith(".safetensors")]
    assert all(other[name] != first[name] for name in weights)
    assert other["tokenizer.json"] == first["tokenizer.json"]


def test_default_sizes_are_those_that_the_readme_states(tmp_path: Path) -> None:
    facts = parse_config(*read_config(make_checkpoint(tmp_path / "x", "text-fp8", "fp8")))
    assert (facts.hidden_size, facts.num_layers, facts.num_heads, facts.num_kv_heads, facts.head_dim) == (
        256,
        8,
        16,
        2,
        128,
    )
    assert (facts.linear_num_key_heads, facts.linear_num_value_heads) == (4, 32)
    assert (facts.linear_key_head_dim, facts.linear_value_head_dim) == (128, 128)
    assert (facts.num_experts, facts.top_k, facts.moe_intermediate_size, facts.shared_intermediate_size) == (
        8,
        3,
        512,
        1024,
    )
    assert (facts.vocab_size, facts.max_position, facts.mtp_layers) == (2048, 16384, 1)
    assert len(facts.eos_token_ids) == 2


def test_rewriting_a_directory_leaves_no_old_shard(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "x", "dense", "bf16", layers=8)
    more = len(list(path.glob("*.safetensors")))
    make_checkpoint(path, "dense", "none", layers=4)
    assert len(list(path.glob("*.safetensors"))) < more
    assert {CheckpointReader(path).info(name).file for name in CheckpointReader(path).names} == {
        p.name for p in path.glob("*.safetensors")
    }


def test_a_write_that_is_cut_short_leaves_no_config_and_the_next_one_repairs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = digests(make_checkpoint(tmp_path / "whole", "dense", "none", layers=4))
    path = make_checkpoint(tmp_path / "x", "dense", "none", layers=4)

    def disk_full(*args: object, **more: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(synthetic, "save_file", disk_full)
        with pytest.raises(UserError, match="No space left"):
            make_checkpoint(path, "dense", "none", layers=4)
    assert not (path / "config.json").exists()
    assert digests(make_checkpoint(path, "dense", "none", layers=4)) == whole


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        (("text", "fp8", "default"), "layout 'text' is unknown; legal: text-fp8, text-bf16, vl-fp8, dense"),
        (("dense", "fp8", "default"), "mtp 'fp8' is not possible in layout dense; legal: bf16, none"),
        (("vl-fp8", "int4", "default"), "mtp 'int4' is not possible in layout vl-fp8; legal: fp8, bf16, none"),
        (("dense", "none", "huge"), "dims 'huge' is unknown; legal: default, narrow"),
    ],
)
def test_a_layout_that_does_not_exist_is_refused(tmp_path: Path, wish: tuple[str, str, str], said: str) -> None:
    layout, mtp, dims = wish
    with pytest.raises(UserError, match=said):
        make_checkpoint(tmp_path / "x", layout, mtp, dims=dims)
    assert not (tmp_path / "x").exists()


def test_a_directory_with_something_else_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="is not empty and was not written by make-checkpoint"):
        make_checkpoint(tmp_path, "dense", "none")
    with pytest.raises(UserError, match="is not a directory"):
        make_checkpoint(tmp_path / "thesis.txt", "dense", "none")
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.filterwarnings(*ACCEPTED)
@pytest.mark.parametrize("name", ["text-bf16", "dense"])
def test_transformers_loads_it_whole_and_its_logits_are_well_conditioned(
    checkpoints: dict[str, Path], name: str
) -> None:
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(checkpoints[name], dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    ids = torch.randint(0, 2000, (1, 65), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        out = model(ids, output_hidden_states=True)
    assert 1.0 < out.logits.std(-1).mean() < 3.0
    assert 1.0 < out.logits.std(1).mean() < 3.0, "answers depend on the place in the text"
    assert all(0.5 < hidden.std() < 5.0 for hidden in out.hidden_states)
    log_probs = out.logits.log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1).mean()
    assert 3.0 < entropy < 7.0
