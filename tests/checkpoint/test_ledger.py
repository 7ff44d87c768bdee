"""Every way a checkpoint can be wrong ends in one line that names the tensor, before any tensor data is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rocm_serve.checkpoint.ledger import stage_catalogue, validate
from rocm_serve.checkpoint.reader import INDEX, CheckpointReader
from rocm_serve.config.schema import ServeConfig
from rocm_serve.diagnostics.launch import plan_launch
from rocm_serve.errors import UserError
from rocm_serve.models.qwen3_5.spec import parse_config, stage_params
from rocm_serve.parallel.mesh import Mesh
from rocm_serve.platform.gpus import GPUS
from tests.checkpoint.holes import FILES, Headers, headers_of, hollow, read_index, write_index
from tests.checkpoint.published import write_holes
from tests.made import LAYOUTS

EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"
SCALE = f"{EXPERT}_scale_inv"
VL = "model.language_model.layers.3.self_attn."


def check(path: Path, mesh: Mesh | None = None, *, mtp: bool = True) -> CheckpointReader:
    reader = CheckpointReader(path)
    try:
        validate(reader, parse_config(*reader.config()), mesh or Mesh(1, 1), mtp=mtp)
    finally:
        assert reader.bytes_read == 0, "tensor data was read"
    return reader


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 2), (4, 1), (1, 4)])
@pytest.mark.parametrize("mtp", [True, False])
def test_a_good_checkpoint_passes_for_every_mesh(
    checkpoints: dict[str, Path], name: str, tp: int, pp: int, mtp: bool
) -> None:
    check(checkpoints[name], Mesh(tp, pp), mtp=mtp)


def removed(*names: str) -> Callable[[Headers], Headers]:
    return lambda headers: {name: what for name, what in headers.items() if name not in names}


def changed(**what: tuple[str, tuple[int, ...]]) -> Callable[[Headers], Headers]:
    return lambda headers: headers | {name.replace("__", "."): entry for name, entry in what.items()}


def put(name: str, dtype: str, *shape: int) -> Callable[[Headers], Headers]:
    return lambda headers: headers | {name: (dtype, shape)}


def all_of(*changes: Callable[[Headers], Headers]) -> Callable[[Headers], Headers]:
    def apply(headers: Headers) -> Headers:
        for change in changes:
            headers = change(headers)
        return headers

    return apply


WRONG: dict[str, tuple[str, Callable[[Headers], Headers], str]] = {
    "missing": ("dense", removed("model.layers.2.mlp.up_proj.weight"), r"lacks model.layers.2.mlp.up_proj.weight$"),
    "many missing": (
        "dense",
        lambda headers: {name: what for name, what in headers.items() if ".layers.2." not in name},
        r"lacks model.layers.2.input_layernorm.weight, .* and \d+ more$",
    ),
    "missing head": ("dense", removed("lm_head.weight"), r"lacks lm_head.weight$"),
    "missing mtp": (
        "text-bf16",
        removed("mtp.fc.weight"),
        r"lacks mtp.fc.weight, of the draft layer .*; legal: --speculative off$",
    ),
    "missing experts": (
        "text-bf16",
        removed("model.layers.0.mlp.experts.down_proj"),
        r"lacks model.layers.0.mlp.experts.0",
    ),
    "extra": ("dense", put("model.layers.0.mlp.bias", "BF16", 4), r"has no use for: model.layers.0.mlp.bias$"),
    "extra top": ("vl-fp8", put("visual.x", "BF16", 4), r"has no use for: visual.x$"),
    "extra expert": (
        "text-bf16",
        put("model.layers.0.mlp.experts.0.up_proj.weight", "BF16", 512, 256),
        r"has no use for: model.layers.0.mlp.experts.0.up_proj.weight$",
    ),
    "bias": ("dense", put("model.layers.3.self_attn.q_proj.bias", "BF16", 4096), r"no use for: .*q_proj.bias$"),
    "layer too many": (
        "dense",
        put("model.layers.4.mlp.up_proj.weight", "BF16", 4),
        r"beyond num_hidden_layers 4: .*4.mlp",
    ),
    "misshapen": (
        "dense",
        put("model.layers.3.self_attn.o_proj.weight", "BF16", 2048, 256),
        r"o_proj.weight has shape \[2048, 256\]; the configuration asks for \[256, 2048\]$",
    ),
    "misshapen scale": (
        "text-fp8",
        put(SCALE, "BF16", 2, 4),
        r"has shape \[2, 4\]; the configuration asks for \[4, 2\]$",
    ),
    "misshapen experts": (
        "text-bf16",
        put("model.layers.0.mlp.experts.gate_up_proj", "BF16", 8, 1024, 128),
        r"gate_up_proj has shape \[8, 1024, 128\]",
    ),
    "FP8 without scale": (
        "dense",
        put("model.layers.0.mlp.up_proj.weight", "F8_E4M3", 1024, 256),
        r"up_proj.weight is F8_E4M3 without a scale; legal: BF16, F16, F32$",
    ),
    "scale but not FP8": ("text-fp8", put(EXPERT, "BF16", 512, 256), r"is BF16 with a scale; legal: F8_E4M3$"),
    "scale without weight": ("text-fp8", removed(EXPERT), rf"^scale without its weight: {SCALE}$"),
    "weight without scale": ("text-fp8", removed(SCALE), rf"^{EXPERT} has no scale {SCALE}, but by config.json"),
    "unlisted FP8": (
        "text-fp8",
        all_of(
            put("model.layers.0.mlp.shared_expert.up_proj.weight", "F8_E4M3", 1024, 256),
            put("model.layers.0.mlp.shared_expert.up_proj.weight_scale_inv", "BF16", 8, 2),
        ),
        r"shared_expert.up_proj.weight has a scale, but by config.json \(modules_to_not_convert\) it is not FP8$",
    ),
    "listed FP8 stored in BF16": (
        "vl-fp8",
        all_of(removed(f"{VL}k_proj.weight_scale_inv"), put(f"{VL}k_proj.weight", "BF16", 256, 256)),
        r"k_proj.weight has no scale .*k_proj.weight_scale_inv, but by config.json \(quantization_config\) it is FP8$",
    ),
    "two names": (
        "vl-fp8",
        put("model.norm.weight", "BF16", 256),
        r"holds model.norm.weight twice, as model.language_model.norm.weight and as model.norm.weight$",
    ),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("pp", [1, 2])
def test_a_wrong_tensor_is_named_in_one_line(checkpoints: dict[str, Path], tmp_path: Path, case: str, pp: int) -> None:
    layout, change, said = WRONG[case]
    path = hollow(checkpoints[layout], tmp_path / "wrong", change(headers_of(checkpoints[layout])))
    with pytest.raises(UserError, match=said) as caught:
        check(path, Mesh(1, pp))
    assert "\n" not in str(caught.value)


def test_the_unchanged_hollow_checkpoint_passes(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    for layout in LAYOUTS:
        check(hollow(checkpoints[layout], tmp_path / layout, headers_of(checkpoints[layout])), Mesh(2, 2))


@pytest.mark.parametrize("mesh", [Mesh(3, 1), Mesh(8, 1), Mesh(1, 5)])
def test_an_illegal_degree_names_the_legal_ones(checkpoints: dict[str, Path], mesh: Mesh) -> None:
    with pytest.raises(UserError, match=r"legal: 1, 2, 4$|legal: 1\.\.4$"):
        check(checkpoints["text-fp8"], mesh)


def test_a_tensor_in_a_shard_that_the_index_forgot_is_named(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    path = hollow(checkpoints["dense"], tmp_path / "x", headers_of(checkpoints["dense"]))
    index = read_index(path)
    del index["mtp.norm.weight"]
    write_index(path, index)
    with pytest.raises(UserError, match=r"lacks mtp.norm.weight, of the draft layer"):
        check(path)
    with pytest.raises(UserError, match=rf"{FILES[1]} holds mtp.norm.weight, which the index does not place there"):
        check(path, mtp=False)


def test_mtp_that_the_model_does_not_have_is_refused(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    path = hollow(checkpoints["dense"], tmp_path / "x", headers_of(checkpoints["dense"]))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"mtp_num_hidden_layers": 0}))
    with pytest.raises(UserError, match="mtp_num_hidden_layers is 0"):
        check(path)
    check(path, mtp=False)


def test_a_tied_model_needs_no_head_and_keeps_one_with_a_warning(
    checkpoints: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    headers = headers_of(checkpoints["dense"])
    reader = CheckpointReader(hollow(checkpoints["dense"], tmp_path / "x", headers))
    tied = replace(parse_config(*reader.config()), tie_word_embeddings=True)
    validate(reader, tied, Mesh(2, 2), mtp=True)
    (said,) = caplog.messages
    assert "tie_word_embeddings, but the files hold lm_head.weight: it is used" in said
    found = stage_catalogue(reader, tied, Mesh(1, 1).coord(0), mtp=True)
    assert not found.tied and not found.ignored
    params = stage_params(tied, Mesh(1, 1).coord(0), formats=found, mtp=True)
    assert params["lm_head.weight"].parts[0].key == "lm_head.weight"
    caplog.clear()
    del headers["lm_head.weight"]
    reader = CheckpointReader(hollow(checkpoints["dense"], tmp_path / "y", headers))
    validate(reader, tied, Mesh(2, 2), mtp=True)
    assert not caplog.records


def test_any_float_dtype_is_accepted_where_a_weight_is_not_fp8(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    headers = headers_of(checkpoints["text-fp8"])
    headers["model.layers.0.linear_attn.A_log"] = ("F32", (8,))
    headers[SCALE] = ("F32", (4, 2))
    check(hollow(checkpoints["text-fp8"], tmp_path / "x", headers))


def test_a_truncated_shard_of_which_nothing_is_used_is_still_named(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    headers = headers_of(checkpoints["vl-fp8"])
    vision = {name: what for name, what in headers.items() if name.startswith("model.visual.")}
    path = hollow(checkpoints["vl-fp8"], tmp_path / "x", {n: h for n, h in headers.items() if n not in vision})
    write_holes(path / "vision.safetensors", [(name, *what) for name, what in vision.items()])
    write_index(path, read_index(path) | dict.fromkeys(vision, "vision.safetensors"))
    check(path)
    with (path / "vision.safetensors").open("r+b") as stream:
        stream.truncate((path / "vision.safetensors").stat().st_size - 1)
    with pytest.raises(UserError, match=r"vision.safetensors is truncated: model.visual"):
        check(path)


def test_a_node_needs_the_files_of_its_own_stages_only(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    whole = checkpoints["text-fp8"]
    facts = parse_config(*CheckpointReader(whole).config())
    mesh = Mesh(2, 2)
    index = read_index(whole)
    for node in range(2):
        stages = mesh.stages_of(node, 2)
        own = plan_launch(ServeConfig(model=str(whole), tp=2, pp=2, max_model_len=64), GPUS["mi300x"], nnodes=2)
        path = tmp_path / f"node{node}"
        path.mkdir()
        for file in (*own.nodes[node].files, "config.json", INDEX):
            (path / file).symlink_to(whole / file)
        if set(own.nodes[node].files) != set(index.values()):
            with pytest.raises(UserError, match="has no such file"):
                check(path, mesh, mtp=False)
        validate(CheckpointReader(path), facts, mesh, mtp=False, stages=stages)
        missing = path / own.nodes[node].files[0]
        missing.unlink()
        with pytest.raises(UserError, match=f"names {missing.name}, but .* has no such file"):
            validate(CheckpointReader(path), facts, mesh, mtp=False, stages=stages)
