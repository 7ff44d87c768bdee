"""The parameter table of every layout: complete, evenly sharded, and the same from config.json as from the files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from math import prod
from pathlib import Path

import pytest

from rocm_serve.checkpoint.ledger import stage_catalogue
from rocm_serve.checkpoint.reader import CheckpointReader
from rocm_serve.errors import UserError
from rocm_serve.models.qwen3_5.spec import (
    ConfigFormats,
    ModelFacts,
    one_of_each,
    parse_config,
    promised_fp8,
    stage_params,
)
from rocm_serve.parallel.expert_map import DRAFT_LAYER, ExpertMap, ExpertPlan
from rocm_serve.parallel.layout import Param, Part, Place, copies, shape_at
from rocm_serve.parallel.mesh import Mesh
from tests.checkpoint import published
from tests.made import LAYOUTS

Box = tuple[tuple[int, int], ...]


def facts_of(path: Path) -> ModelFacts:
    return parse_config(*CheckpointReader(path).config())


def boxes_tile(boxes: Iterable[Box], shape: tuple[int, ...]) -> bool:
    """Say whether boxes are disjoint and cover `shape`: every pair apart, and the volumes add up."""
    found = sorted(set(boxes))
    apart = all(
        any(a[d][1] <= b[d][0] or b[d][1] <= a[d][0] for d in range(len(shape)))
        for i, a in enumerate(found)
        for b in found[i + 1 :]
    )
    inside = all(0 <= lo < hi <= n for box in found for (lo, hi), n in zip(box, shape, strict=True))
    return apart and inside and sum(prod(hi - lo for lo, hi in box) for box in found) == prod(shape)


def form(param: Param) -> tuple[object, ...]:
    """What decides how a parameter is cut, without its names: equal forms obey the law together."""
    order = {key: i for i, key in enumerate(dict.fromkeys(part.key for part in param.parts))}
    parts = tuple((order[p.key], p.source, p.bands, p.start, p.at) for p in param.parts)
    return param.dims, parts


def check_param(param: Param, tp: int, ep: int = 1) -> None:
    """Over all ranks: each checkpoint element is loaded equally often, each local element is written once."""
    loaded = copies_of_all(param, tp, ep)
    verdicts: dict[tuple[object, ...], bool] = {}
    for part in param.parts:
        boxes = loaded[part.key]
        known = (part.source, tuple(sorted(boxes.items())))
        if known not in verdicts:
            verdicts[known] = boxes_tile(boxes, part.source) and len(set(boxes.values())) == 1
        assert verdicts[known], f"{part.key}: {boxes}"


def check_experts(param: Param, tp: int, ep: int, slots: tuple[int, ...]) -> None:
    """Over all ranks: each expert is loaded once for each of its slots, each local element is written once."""
    replicas = Counter(slots)
    for key, boxes in copies_of_all(param, tp, ep).items():
        source = next(part.source for part in param.parts if part.key == key)
        if len(source) == 2:
            expert = int(key.partition(".experts.")[2].split(".")[0])
            assert boxes_tile(boxes, source) and set(boxes.values()) == {replicas[expert]}, key
            continue
        assert boxes_tile(boxes, source), key
        for (first, *_), count in boxes.items():
            assert first[1] == first[0] + 1 and count == replicas[first[0]], key


def copies_of_all(param: Param, tp: int, ep: int) -> dict[str, Counter[Box]]:
    """Return what all ranks copy, after checking that each local element is written once."""
    loaded: dict[str, Counter[Box]] = {}
    for rank in range(tp):
        place = Place(tp, rank, ep)
        written = []
        for copy in copies(param, place):
            loaded.setdefault(copy.key, Counter())[tuple((s.start, s.stop) for s in copy.src)] += 1
            written.append(tuple((s.start, s.stop) for s in copy.dst))
        assert len(written) == len(set(written)), param.name
        assert_tiles(written, shape_at(param, place), param.name)
    return loaded


def assert_tiles(written: list[Box], shape: tuple[int, ...], name: str) -> None:
    """Check that boxes tile `shape`; a stack of single rows is checked row by row, all rows being alike."""
    by_row: dict[tuple[int, int], list[Box]] = {}
    for box in written:
        by_row.setdefault(box[0], []).append(box[1:])
    stacked = len(shape) == 3 and len(by_row) > 1 and all(hi - lo == 1 for lo, hi in by_row)
    if not stacked:
        assert boxes_tile(written, shape), name
        return
    patterns = {tuple(sorted(boxes)) for boxes in by_row.values()}
    assert sorted(lo for lo, _ in by_row) == list(range(shape[0])), name
    assert len(patterns) == 1 and boxes_tile(patterns.pop(), shape[1:]), name


def check_tables(facts: ModelFacts, pp: int, degrees: Iterable[int], eps: Iterable[int] = (1,)) -> None:
    """Check the law for every parameter of every stage, structurally: nothing is allocated."""
    uses: Counter[str] = Counter()
    names: Counter[str] = Counter()
    forms: dict[tuple[object, ...], Param] = {}
    for stage in range(pp):
        params = stage_params(facts, Mesh(1, pp).coord(stage), formats=ConfigFormats(facts), mtp=True)
        for name, param in params.items():
            assert name == param.name
            names[name] += 1
            uses.update({part.key for part in param.parts})
            forms.setdefault(form(param), param)
    assert set(names.values()) == {1}
    twice = {key for key, count in uses.items() if count > 1}
    assert twice == ({"model.embed_tokens.weight"} if pp > 1 else set()), "a tensor fills two parameters"
    for param in forms.values():
        for tp in degrees:
            for ep in (ep for ep in eps if tp % ep == 0):
                check_param(param, tp, ep)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("pp", [1, 2])
def test_every_element_is_loaded_equally_often_in_every_layout(
    checkpoints: dict[str, Path], name: str, pp: int
) -> None:
    facts = facts_of(checkpoints[name])
    check_tables(facts, pp, (1, 2, 4), (1, 2, 4) if facts.is_moe else (1,))


@pytest.mark.parametrize("pp", [1, 2])
def test_every_element_of_the_2_4t_model_is_loaded_equally_often(pp: int) -> None:
    check_tables(parse_config(published.config()), pp, (1, 2, 4, 8, 16))


@pytest.mark.parametrize(("tp", "ep"), [(2, 2), (4, 4), (8, 2), (8, 4), (8, 8), (16, 8)])
def test_the_experts_of_the_2_4t_model_are_shared_out_evenly(tp: int, ep: int) -> None:
    facts = one_of_each(parse_config(published.config()))
    plan = ExpertPlan(ep, shared_whole=True)
    params = stage_params(facts, Mesh(tp, 1, ep).coord(0), formats=ConfigFormats(facts), mtp=True, experts=plan)
    experts = [param for name, param in params.items() if name.startswith(("model.layers.0.mlp", "mtp.layers.0.mlp"))]
    assert len(experts) == 2 * 8
    for param in experts:
        check_param(param, tp, ep)
    for layer, cut in (("model.layers.0", 1), ("mtp.layers.0", tp)):
        place = Place(tp, tp - 1, ep)
        assert shape_at(params[f"{layer}.mlp.experts.gate_up_proj"], place) == (512 // ep, 2 * 2048 * ep // tp, 8192)
        assert shape_at(params[f"{layer}.mlp.experts.down_proj_scale_inv"], place) == (512 // ep, 64, 16 * ep // tp)
        assert shape_at(params[f"{layer}.mlp.shared_expert.down_proj.weight"], place) == (8192, 2048 // cut)
        assert shape_at(params[f"{layer}.mlp.shared_expert.gate_up_proj.weight"], place) == (2 * 2048 // cut, 8192)


MAPS = {
    "moved": (5, 0, 2, 7, 1, 6, 3, 4),
    "held twice": (5, 0, 2, 7, 1, 6, 3, 4, 0, 5, 0, 4, 2, 3, 3, 3),
}


@pytest.mark.parametrize("slots", MAPS.values(), ids=MAPS)
@pytest.mark.parametrize("name", ["text-fp8-mtp-bf16", "text-bf16"])
def test_every_expert_is_loaded_into_each_of_its_slots(
    checkpoints: dict[str, Path], name: str, slots: tuple[int, ...]
) -> None:
    facts = facts_of(checkpoints[name])
    plan = ExpertPlan(maps={layer: ExpertMap(slots, 1) for layer in (1, DRAFT_LAYER)}, draft_shared_whole=True)
    params = stage_params(facts, Mesh(1, 1).coord(0), formats=ConfigFormats(facts), mtp=True, experts=plan)
    for param in (param for name, param in params.items() if ".experts." in name):
        for tp, ep in ((1, 1), (4, 1), (4, 2), (4, 4), (8, 2), (8, 8)):  # the table is the same for all degrees
            if param.name.startswith(("model.layers.1.", "mtp.")):
                check_experts(param, tp, ep, slots)
            else:
                check_param(param, tp, ep)


def test_a_placement_of_another_model_or_degree_is_refused(checkpoints: dict[str, Path]) -> None:
    facts = facts_of(checkpoints["text-bf16"])

    def table(layer: int, slots: tuple[int, ...], ep: int) -> None:
        plan = ExpertPlan(2, maps={layer: ExpertMap(slots, ep)})
        stage_params(facts, Mesh(4, 1, 2).coord(0), formats=ConfigFormats(facts), mtp=True, experts=plan)

    table(1, (*range(8), 0, 1), 2)
    legal = r"legal: 8 experts over 2 \(--ep\)$"
    with pytest.raises(UserError, match=rf"^the expert placement of layer 1 is one of 6 experts over 2 ranks; {legal}"):
        table(1, tuple(range(6)), 2)
    with pytest.raises(UserError, match=rf"of the draft layer is one of 8 experts over 4 ranks; {legal}"):
        table(DRAFT_LAYER, tuple(range(8)), 4)


@pytest.mark.parametrize(
    ("tp", "ep", "said"),
    [
        (4, 3, r"ep 3 cannot be used: it does not divide tp 4; legal: 1, 2, 4"),
        (2, 4, r"ep 4 cannot be used: it does not divide tp 2; legal: 1, 2"),
    ],
)
def test_an_expert_degree_that_cannot_be_is_refused_with_the_legal_ones(
    checkpoints: dict[str, Path], tp: int, ep: int, said: str
) -> None:
    facts = facts_of(checkpoints["text-fp8"])
    with pytest.raises(UserError, match=f"^{said}$"):
        stage_params(facts, Mesh(tp, 1, ep).coord(0), formats=ConfigFormats(facts), mtp=False, experts=ExpertPlan(ep))


def test_a_dense_model_has_no_expert_ranks(checkpoints: dict[str, Path]) -> None:
    facts = facts_of(checkpoints["dense"])
    with pytest.raises(UserError, match=r"^ep 2 cannot be used: the model has no experts; legal: 1$"):
        stage_params(facts, Mesh(2, 1, 2).coord(0), formats=ConfigFormats(facts), mtp=False, experts=ExpertPlan(2))


def test_the_table_names_every_tensor_of_the_2_4t_repository_and_its_shape() -> None:
    facts = parse_config(published.config())
    params = stage_params(facts, Mesh(1, 1).coord(0), formats=ConfigFormats(facts), mtp=True)
    ours = {part.key: (param.dtype == "fp8", part.source) for param in params.values() for part in param.parts}
    theirs = {name: (dtype == "F8_E4M3", shape) for name, dtype, shape in published.entries()}
    assert ours == theirs


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_configuration_alone_and_the_files_give_the_same_table(checkpoints: dict[str, Path], name: str) -> None:
    reader = CheckpointReader(checkpoints[name])
    facts = parse_config(*reader.config())
    for rank in range(2):
        coord = Mesh(1, 2).coord(rank)
        found = stage_catalogue(reader, facts, coord, mtp=True)
        by_files = stage_params(facts, coord, formats=found, mtp=True)
        assert by_files == stage_params(facts, coord, formats=ConfigFormats(facts), mtp=True)


def test_a_stage_has_its_own_layers_only_and_the_last_one_brings_its_own_embedding(
    checkpoints: dict[str, Path],
) -> None:
    facts = facts_of(checkpoints["text-fp8"])
    first, last = (
        stage_params(facts, Mesh(1, 2).coord(rank), formats=ConfigFormats(facts), mtp=True) for rank in (0, 1)
    )
    assert {name.split(".")[2] for name in first if ".layers." in name} == {"0", "1"}
    assert "model.embed_tokens.weight" in first and "mtp.embed_tokens.weight" not in first
    assert {name.split(".")[2] for name in last if name.startswith("model.layers.")} == {"2", "3"}
    assert last["mtp.embed_tokens.weight"].parts[0].key == "model.embed_tokens.weight"
    assert "lm_head.weight" in last and "model.norm.weight" in last and "lm_head.weight" not in first
    whole = stage_params(facts, Mesh(1, 1).coord(0), formats=ConfigFormats(facts), mtp=True)
    assert "mtp.embed_tokens.weight" not in whole
    without = stage_params(facts, Mesh(1, 1).coord(0), formats=ConfigFormats(facts), mtp=False)
    assert not any(name.startswith("mtp.") for name in without)


def test_a_tied_head_is_filled_from_the_embedding(checkpoints: dict[str, Path]) -> None:
    from dataclasses import replace

    facts = replace(facts_of(checkpoints["dense"]), tie_word_embeddings=True)
    params = stage_params(facts, Mesh(1, 1).coord(0), formats=ConfigFormats(facts), mtp=False)
    assert params["lm_head.weight"].parts == (Part("model.embed_tokens.weight", (2048, 256), (0, 0), (0, 0)),)


def test_qkv_is_cut_in_three_and_gates_stay_with_their_heads(checkpoints: dict[str, Path]) -> None:
    facts = facts_of(checkpoints["text-bf16"])
    params = stage_params(facts, Mesh(2, 1).coord(0), formats=ConfigFormats(facts), mtp=False)
    gdn = list(copies(params["model.layers.0.linear_attn.in_proj_qkvz.weight"], Place(2, 1)))
    spans = [(copy.key.rsplit(".", 2)[1], copy.src[0].start, copy.src[0].stop) for copy in gdn]
    qkv = "in_proj_qkv"
    assert spans == [(qkv, 256, 512), (qkv, 768, 1024), (qkv, 1536, 2048), ("in_proj_z", 512, 1024)]
    conv = list(copies(params["model.layers.0.linear_attn.conv1d.weight"], Place(2, 1)))
    assert [(c.src[0].start, c.src[0].stop) for c in conv] == [(256, 512), (768, 1024), (1536, 2048)]
    attention = list(copies(params["model.layers.3.self_attn.qkv_proj.weight"], Place(4, 3)))
    assert [(c.src[0].start, c.src[0].stop) for c in attention] == [(3072, 4096), (128, 256), (128, 256)]
    experts = list(copies(params["model.layers.0.mlp.experts.gate_up_proj"], Place(2, 1)))
    assert [(c.src[1].start, c.src[1].stop) for c in experts] == [(256, 512), (768, 1024)]


def test_an_fp8_block_is_never_cut(tmp_path: Path) -> None:
    from rocm_serve.checkpoint.synthetic import make_checkpoint

    facts = facts_of(make_checkpoint(tmp_path / "narrow", "text-fp8", "fp8", dims="narrow", layers=4))
    stage_params(facts, Mesh(1, 2).coord(0), formats=ConfigFormats(facts), mtp=True)
    said = r"^tp 2 cannot be used: with ep 2 it could, but with ep 1 it does not divide 1 FP8 block \(128 wide\) of"
    with pytest.raises(UserError, match=rf"{said} expert columns; legal: 1$"):
        stage_params(facts, Mesh(2, 1).coord(0), formats=ConfigFormats(facts), mtp=True)
    stage_params(facts, Mesh(2, 1, 2).coord(0), formats=ConfigFormats(facts), mtp=True, experts=ExpertPlan(2))


@pytest.mark.parametrize(("tp", "legal"), [(3, "1, 2, 4"), (8, "1, 2, 4")])
def test_a_degree_that_cuts_a_head_names_the_legal_ones(checkpoints: dict[str, Path], tp: int, legal: str) -> None:
    facts = facts_of(checkpoints["text-fp8"])
    with pytest.raises(UserError, match=rf"^tp {tp} cannot be used: .*GDN key heads.*; legal: {legal}$"):
        stage_params(facts, Mesh(tp, 1).coord(0), formats=ConfigFormats(facts), mtp=False)


def test_parts_of_a_fused_projection_in_two_precisions_are_refused(checkpoints: dict[str, Path]) -> None:
    class Mixed:
        tied = False

        def fused(self, stem: str) -> bool:
            return False

        def fp8(self, key: str) -> bool:
            return key.endswith("k_proj.weight")

    facts = facts_of(checkpoints["vl-fp8"])
    with pytest.raises(UserError, match="k_proj.weight has FP8 scales and .*q_proj.weight has none"):
        stage_params(facts, Mesh(1, 1).coord(0), formats=Mixed(), mtp=False)


def test_mtp_of_a_model_without_it_is_refused(checkpoints: dict[str, Path]) -> None:
    from dataclasses import replace

    facts = replace(facts_of(checkpoints["dense"]), mtp_layers=0)
    with pytest.raises(UserError, match="mtp_num_hidden_layers is 0"):
        stage_params(facts, Mesh(1, 1).coord(0), formats=ConfigFormats(facts), mtp=True)


def test_exclusions_are_matched_by_whole_words() -> None:
    from dataclasses import replace

    facts = parse_config(published.config())
    assert facts.quantization is not None

    def promised(key: str, *excluded: str) -> bool:
        quant = facts.quantization
        assert quant is not None
        return promised_fp8(replace(facts, quantization=replace(quant, not_converted=frozenset(excluded))), key)

    key = "model.layers.1.mlp.experts.1.up_proj.weight"
    assert promised(key)
    assert promised(key, "model.layers.1.mlp.experts.10.up_proj", "model.layers.1.mlp.expert", "proj")
    for name in ("model.layers.1.mlp.experts.1.up_proj", "model.layers.1", "experts.1.up_proj", "up_proj"):
        assert not promised(key, name)
    assert not promised("model.layers.1.mlp.gate.weight")
    assert not promised("model.layers.1.linear_attn.in_proj_a.weight")
    assert promised("model.layers.1.linear_attn.in_proj_qkv.weight")
