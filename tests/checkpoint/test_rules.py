"""Names: layers of other stages never get mapped, each group is counted, prefixes are matched at the start only."""

from __future__ import annotations

import pytest

from rocm_serve.checkpoint.rules import catalogue, orphan_scales
from rocm_serve.errors import UserError

NAMES = [
    "model.language_model.embed_tokens.weight",
    "model.language_model.layers.0.mlp.gate.weight",
    "model.language_model.layers.1.mlp.experts.3.up_proj.weight",
    "model.language_model.layers.1.mlp.experts.3.up_proj.weight_scale_inv",
    "model.language_model.norm.weight",
    "model.visual.blocks.1.attn.qkv.weight",
    "lm_head.weight",
    "mtp.fc.weight",
    "mtp.layers.0.mlp.gate.weight",
]


def test_a_stage_maps_its_own_names_and_counts_the_rest_by_group() -> None:
    first = catalogue(NAMES, range(0, 1), first=True, last=False, mtp=True, tied=False)
    assert first.tensors == {
        "model.embed_tokens.weight": NAMES[0],
        "model.layers.0.mlp.gate.weight": NAMES[1],
    }
    assert first.foreign == {
        "layers of other stages": 2,
        "model.norm.weight of another stage": 1,
        "lm_head.weight of another stage": 1,
        "mtp.* of the last stage": 2,
    }
    assert list(first.ignored.values()) == [1]
    assert next(iter(first.ignored)).startswith("model.visual.*")


def test_the_last_stage_takes_the_head_and_the_draft_layer_with_an_embedding() -> None:
    last = catalogue(NAMES, range(1, 2), first=False, last=True, mtp=True, tied=False)
    assert set(last.tensors.values()) == {NAMES[0], *NAMES[2:5], *NAMES[6:]}
    assert last.fp8("model.layers.1.mlp.experts.3.up_proj.weight")
    without = catalogue(NAMES, range(1, 2), first=False, last=True, mtp=False, tied=False)
    assert set(without.tensors.values()) == {*NAMES[2:5], NAMES[6]}
    assert without.ignored["mtp.* (no draft layer on this rank)"] == 2


def test_a_tied_head_is_the_embedding_on_the_last_stage_unless_the_files_hold_one() -> None:
    names = [name for name in NAMES if name != "lm_head.weight"]
    tied = catalogue(names, range(1, 2), first=False, last=True, mtp=False, tied=True)
    assert tied.tied and "model.embed_tokens.weight" in tied.tensors
    own = catalogue(NAMES, range(1, 2), first=False, last=True, mtp=False, tied=True)
    assert own == catalogue(NAMES, range(1, 2), first=False, last=True, mtp=False, tied=False)
    assert not own.tied and "lm_head.weight" in own.tensors


def test_every_name_is_accounted_for_exactly_once() -> None:
    for first, last, mtp, tied in [(True, True, True, False), (True, False, False, True), (False, True, True, True)]:
        found = catalogue(NAMES, range(0, 2), first=first, last=last, mtp=mtp, tied=tied)
        assert len(found.tensors) + found.foreign.total() + found.ignored.total() == len(NAMES)


def test_one_tensor_under_two_names_is_refused() -> None:
    names = ["model.layers.0.mlp.gate.weight", "model.language_model.layers.0.mlp.gate.weight"]
    with pytest.raises(
        UserError, match="holds model.layers.0.mlp.gate.weight twice, as model.layers.* and as model.lang"
    ):
        catalogue(names, range(0, 1), first=True, last=True, mtp=False, tied=False)


def test_format_is_decided_tensor_by_tensor() -> None:
    names = [
        "model.layers.0.mlp.experts.gate_up_proj",
        "model.layers.0.mlp.experts.0.down_proj.weight",
        "model.layers.1.mlp.experts.0.gate_proj.weight",
        "model.layers.1.mlp.experts.down_proj",
        "model.layers.1.mlp.experts.down_proj_scale_inv",
    ]
    found = catalogue(names, range(0, 2), first=True, last=True, mtp=False, tied=False)
    assert [found.fused(f"model.layers.{i}.mlp.experts.{x}_proj") for i in (0, 1) for x in ("gate_up", "down")] == [
        True,
        False,
        False,
        True,
    ]
    assert found.fp8("model.layers.1.mlp.experts.down_proj")
    assert not found.fp8("model.layers.0.mlp.experts.gate_up_proj")


def test_scales_without_weight_are_listed_in_both_spellings() -> None:
    tensors = {"a.weight": "a", "a.weight_scale_inv": "as", "b.weight_scale_inv": "bs", "experts.x_scale_inv": "xs"}
    assert orphan_scales(tensors) == ["bs", "xs"]
