"""Loaded shares, put together, are the checkpoint bit for bit; dummy shares are slices of one virtual checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rocm_serve.checkpoint.fp8 import dequantise
from rocm_serve.checkpoint.ledger import stage_catalogue
from rocm_serve.checkpoint.load import LoadReport, Progress, dummy_fill, load_stage
from rocm_serve.checkpoint.reader import CheckpointReader
from rocm_serve.errors import UserError
from rocm_serve.models.qwen3_5.spec import ModelFacts, parse_config, stage_params
from rocm_serve.parallel.expert_map import ExpertPlan
from rocm_serve.parallel.layout import Param, Place, copies, shape_at
from rocm_serve.parallel.mesh import Coord, Mesh
from tests.checkpoint.holes import FILES, headers_of, hollow
from tests.checkpoint.reassemble import PLAIN, Tensors, raw, reassemble
from tests.made import LAYOUTS

MESHES = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (4, 2)]


def table(
    reader: CheckpointReader, coord: Coord, *, mtp: bool = True, experts: ExpertPlan = PLAIN
) -> tuple[ModelFacts, dict[str, Param]]:
    facts = parse_config(*reader.config())
    found = stage_catalogue(reader, facts, coord, mtp=mtp)
    return facts, stage_params(facts, coord, formats=found, mtp=mtp, experts=experts)


def empty(params: dict[str, Param], coord: Coord, dtype: torch.dtype) -> dict[str, Tensor]:
    """Tensors full of NaN, so that an element left out shows."""
    dtypes = {"model": dtype, "float32": torch.float32, "fp8": torch.float8_e4m3fn}
    return {name: torch.full(shape_at(p, coord.place), torch.nan).to(dtypes[p.dtype]) for name, p in params.items()}


def load(
    path: Path, coord: Coord, dtype: torch.dtype = torch.bfloat16, *, mtp: bool = True, experts: ExpertPlan = PLAIN
) -> tuple[dict[str, Tensor], LoadReport]:
    with CheckpointReader(path) as reader:
        facts, params = table(reader, coord, mtp=mtp, experts=experts)
        into = empty(params, coord, dtype)
        return into, load_stage(reader, facts, coord, params, into)


def whole(
    shares: list[dict[str, Tensor]], facts: ModelFacts, mesh: Mesh, *, fused: bool, experts: ExpertPlan = PLAIN
) -> Tensors:
    """Reassemble all ranks' parameters; tensors held by two stages must agree."""
    found: Tensors = {}
    for stage in range(mesh.pp):
        ranks = [shares[rank] for rank in mesh.tp_group(stage)]
        for name in ranks[0]:
            for key, tensor in reassemble(name, [rank[name] for rank in ranks], facts, fused, experts).items():
                assert key not in found or torch.equal(found[key], tensor)
                found[key] = tensor
    return found


def stored(path: Path) -> Tensors:
    found: Tensors = {}
    for file in path.glob("*.safetensors"):
        found |= load_file(file)
    found = {name.replace("model.language_model.", "model."): raw(t) for name, t in found.items()}
    return {name: tensor for name, tensor in found.items() if not name.startswith("model.visual.")}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(("tp", "pp"), MESHES)
def test_the_shares_of_all_ranks_put_together_are_the_checkpoint(
    checkpoints: dict[str, Path], name: str, tp: int, pp: int
) -> None:
    path, mesh = checkpoints[name], Mesh(tp, pp)
    check_whole(name, path, mesh, [load(path, mesh.coord(rank), torch.float32)[0] for rank in range(mesh.world)])


def check_whole(
    name: str, path: Path, mesh: Mesh, shares: list[dict[str, Tensor]], experts: ExpertPlan = PLAIN
) -> None:
    facts = parse_config(*CheckpointReader(path).config())
    mixed = whole(shares, facts, mesh, fused=name == "text-bf16", experts=experts)
    if name == "text-fp8-mtp-bf16":
        draft = [{n: t for n, t in s.items() if n.startswith("mtp.")} for s in shares]
        fused = whole(draft, facts, mesh, fused=True, experts=experts)
        mixed = {k: t for k, t in mixed.items() if not k.startswith("mtp.layers.0.mlp.experts.")} | fused
    theirs = stored(path)
    assert mixed.keys() == theirs.keys()
    for key, tensor in theirs.items():
        assert torch.equal(mixed[key].float(), tensor.float()), key


def test_scales_and_gdn_vectors_are_float32_and_the_rest_takes_the_run_dtype(checkpoints: dict[str, Path]) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        into, _ = load(checkpoints["vl-fp8"], Mesh(2, 1).coord(1), dtype)
        for name, tensor in into.items():
            if name.endswith(("_scale_inv", "A_log", "dt_bias")):
                assert tensor.dtype is torch.float32, name
            elif tensor.dtype is not torch.float8_e4m3fn:
                assert tensor.dtype is dtype, name
    one = into["model.layers.3.self_attn.o_proj.weight"], into["model.layers.3.self_attn.o_proj.weight_scale_inv"]
    assert dequantise(*one).std() == pytest.approx(2048**-0.5, rel=0.05)


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_report_counts_bytes_and_names_what_was_left_alone(checkpoints: dict[str, Path], name: str) -> None:
    path = checkpoints[name]
    total = len(CheckpointReader(path).names)
    for rank in range(2):
        into, report = load(path, Mesh(1, 2).coord(rank), mtp=False)
        reader = CheckpointReader(path)
        assert report.tensors + sum(report.foreign.values()) + sum(report.ignored.values()) == total
        assert report.parameters == len(into)
        vision = {g: n for g, n in report.ignored.items() if g.startswith("model.visual.")}
        assert sum(vision.values()) == sum(n.startswith("model.visual.") for n in reader.names)
        assert report.ignored["mtp.* (no draft layer on this rank)"] == sum(n.startswith("mtp.") for n in reader.names)
        assert report.bytes_kept == report.bytes_read
        assert f"{report.bytes_kept / 1e9:.3f} GB kept" in report.lines()[0]
        assert len(report.lines()) == 1 + len(report.foreign) + len(report.ignored)


def test_row_slices_are_read_alone_and_columns_as_their_enclosing_range(checkpoints: dict[str, Path]) -> None:
    path = checkpoints["text-bf16"]
    with CheckpointReader(path) as reader:
        _, params = table(reader, Mesh(4, 1).coord(2), mtp=False)
        for name, ratio in (("gate_up_proj", 1.0), ("down_proj", 4.0)):
            key = f"model.layers.1.mlp.experts.{name}"
            kept, read = reader.bytes_kept, reader.bytes_read
            for copy in copies(params[key], Place(4, 2)):
                for block in reader.read(reader.info(key), copy.src):
                    assert block.bits.nbytes < reader.info(key).nbytes
            kept, read = reader.bytes_kept - kept, reader.bytes_read - read
            assert kept == reader.info(key).nbytes // 4
            assert 0.99 * ratio <= read / kept <= ratio


def test_progress_ends_at_its_total_and_says_rate_and_time(checkpoints: dict[str, Path]) -> None:
    said: list[Progress] = []
    with CheckpointReader(checkpoints["dense"]) as reader:
        coord = Mesh(2, 1).coord(0)
        facts, params = table(reader, coord)
        report = load_stage(reader, facts, coord, params, empty(params, coord, torch.bfloat16), said.append)
    assert said[-1].done == said[-1].total == report.bytes_kept
    assert str(Progress(done=2_000_000_000, total=6_000_000_000, seconds=4.0)) == (
        "2.00 of 6.00 GB, 0.50 GB/s, 8 s to go"
    )
    assert Progress(0, 10, 0.0).eta is None


def test_load_refuses_before_it_reads(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    headers = headers_of(checkpoints["text-fp8"])
    del headers["model.layers.3.input_layernorm.weight"]
    path = hollow(checkpoints["text-fp8"], tmp_path / "x", headers)
    with CheckpointReader(path) as reader:
        coord = Mesh(1, 1).coord(0)
        facts, params = table(reader, coord)
        with pytest.raises(UserError, match=r"lacks model.layers.3.input_layernorm.weight$"):
            load_stage(reader, facts, coord, params, empty(params, coord, torch.bfloat16))
        assert reader.bytes_read == 0


def test_a_stage_does_not_open_shards_of_other_stages(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    headers = headers_of(checkpoints["dense"])
    own = (".layers.2.", ".layers.3.", "model.norm.", "lm_head.")
    last = {name: what for name, what in headers.items() if any(word in name for word in own)}
    path = hollow(checkpoints["dense"], tmp_path / "x", last | headers)
    assert len(last) <= len(headers) // 2
    (path / FILES[1]).write_bytes(b"broken")
    into, report = load(path, Mesh(1, 2).coord(1), mtp=False)
    assert report.tensors == len(last)
    assert all((tensor == 0).all() for tensor in into.values())
    with pytest.raises(UserError, match="00002-of-00002.safetensors is not a safetensors file"):
        load(path, Mesh(1, 2).coord(0), mtp=False)


@pytest.mark.parametrize("name", ["vl-fp8", "text-bf16"])
def test_dummy_shares_are_slices_of_one_virtual_checkpoint(checkpoints: dict[str, Path], name: str) -> None:
    path = checkpoints[name]
    found = []
    for tp, pp in ((1, 1), (4, 2)):
        mesh = Mesh(tp, pp)
        shares = []
        for rank in range(mesh.world):
            facts, params = table(CheckpointReader(path), mesh.coord(rank))
            shares.append(empty(params, mesh.coord(rank), torch.bfloat16))
            dummy_fill(params, mesh.coord(rank), shares[-1], seed=5)
        found.append(whole(shares, facts, mesh, fused=name == "text-bf16"))
    assert found[0].keys() == stored(path).keys()
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        for key, tensor in found[0].items():
            assert not tensor.float().isnan().any(), key
            assert torch.equal(other[key], tensor), key


def test_dummy_weights_have_the_spread_of_a_made_checkpoint(checkpoints: dict[str, Path]) -> None:
    coord = Mesh(1, 1).coord(0)
    facts, params = table(CheckpointReader(checkpoints["text-fp8"]), coord)
    dummy = empty(params, coord, torch.float32)
    dummy_fill(params, coord, dummy, seed=1)
    other = empty(params, coord, torch.float32)
    dummy_fill(params, coord, other, seed=2)
    made, _ = load(checkpoints["text-fp8"], coord, torch.float32)
    for name, param in params.items():
        if name.endswith("_scale_inv"):
            continue
        assert not torch.equal(raw(dummy[name]), raw(other[name])), name
        scale = f"{name}_scale_inv"
        pair = [dequantise(w[name], w[scale]) if param.dtype == "fp8" else w[name] for w in (dummy, made)]
        if pair[0].numel() < 1000:
            continue
        assert pair[0].std().item() == pytest.approx(pair[1].std().item(), rel=0.2), name
    assert facts.num_layers == 4


def test_fused_fp8_experts_load_as_those_stored_one_by_one(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    tensors: Tensors = {}
    for file in checkpoints["text-fp8"].glob("*.safetensors"):
        tensors |= load_file(file)
    for stem in [f"model.layers.{i}.mlp.experts" for i in range(2)] + ["mtp.layers.0.mlp.experts"]:
        for suffix in ("", "_scale_inv"):
            one = {
                x: [tensors.pop(f"{stem}.{e}.{x}_proj.weight{suffix}") for e in range(8)]
                for x in ("gate", "up", "down")
            }
            rows = [torch.cat([raw(g), raw(u)]) for g, u in zip(one["gate"], one["up"], strict=True)]
            tensors[f"{stem}.gate_up_proj{suffix}"] = torch.stack(rows).view(one["gate"][0].dtype)
            tensors[f"{stem}.down_proj{suffix}"] = torch.stack([raw(d) for d in one["down"]]).view(one["down"][0].dtype)
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_bytes((checkpoints["text-fp8"] / name).read_bytes())
    save_file(tensors, tmp_path / "model.safetensors")
    for rank in range(4):
        fused, report = load(tmp_path, Mesh(2, 2).coord(rank))
        split, _ = load(checkpoints["text-fp8"], Mesh(2, 2).coord(rank))
        assert fused.keys() == split.keys()
        assert all(torch.equal(raw(fused[name]), raw(split[name])) for name in split)
        assert report.bytes_kept < report.bytes_read
