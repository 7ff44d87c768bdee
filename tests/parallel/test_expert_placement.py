"""Placement files: what was written is read, for the model and degree that it was made for and no other."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rocm_serve.errors import UserError
from rocm_serve.parallel.expert_map import DRAFT_LAYER
from rocm_serve.parallel.expert_placement import FORMAT, MoeShape, Placement, read_placement

SHAPE = MoeShape(architecture="Qwen3_5MoeForCausalLM", num_layers=3, num_experts=6, top_k=2)


def placement(layers: dict[int, tuple[int, ...]], **changes: Any) -> Placement:
    return Placement(**{"format": FORMAT, "version": 1, "model": SHAPE, "ep": 2, "layers": layers, **changes})


@pytest.mark.parametrize("seed", range(3))
def test_what_was_written_is_read(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    layers = {}
    for layer in (DRAFT_LAYER, 0, 2):
        slots = [*range(6), *rng.sample(range(6), 2 * rng.randrange(3))]
        rng.shuffle(slots)
        layers[layer] = tuple(slots)
    placement(layers).write(tmp_path / "p.json")
    maps = read_placement(tmp_path / "p.json", SHAPE, 2, draft=True)
    assert {layer: one.experts for layer, one in maps.items()} == layers
    assert {one.ep for one in maps.values()} == {2}


def test_a_placement_that_moves_nothing_is_a_file_too(tmp_path: Path) -> None:
    placement({}).write(tmp_path / "p.json")
    assert read_placement(tmp_path / "p.json", SHAPE, 2, draft=False) == {}


@pytest.mark.parametrize(
    ("made", "sentence"),
    [
        (placement({}, model=msgspec.structs.replace(SHAPE, top_k=3)), "is of another model .*3 a token.*2 a token"),
        (placement({}, ep=3), "was made for --ep 3, not 2; legal with it: --ep 3"),
        (placement({3: tuple(range(6))}), "names layer 3; the model has 0..2$"),
        (placement({-1: tuple(range(6))}), "names layer -1; the model has 0..2$"),
        (placement({0: (0, 1, 2, 3, 4, 6)}), "layer 0: no such expert: 6; legal: 0..5"),
        (placement({0: (0, 1, 2, 3, 4, -1)}), "layer 0: no such expert: -1"),
        (placement({1: (0, 1, 2, 3, 4, 4)}), "layer 1: expert 5 is in no slot"),
        (placement({0: (0, 1, 2, 3, 4, 5, 0)}), "layer 0: 7 slots cannot be shared by --ep 2 equally"),
        (placement({0: ()}), "layer 0: expert 0 is in no slot"),
        (placement({}, version=2), "version 2"),
        (placement({}, format="rocm-serve expert counts"), "is no 'rocm-serve expert placement' file: its format"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_sentence(made: Placement, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    made.write(path)
    with pytest.raises(UserError) as error:
        read_placement(path, SHAPE, 2, draft=False)
    assert str(error.value).startswith(f"--expert-placement {path}") and re.search(sentence, str(error.value))


def test_an_absent_and_a_broken_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    with pytest.raises(UserError, match="No such file"):
        read_placement(path, SHAPE, 2, draft=False)
    path.write_text('{"format": "rocm-serve expert placement", "version": 1, "layers": {"0": ["a"]}}')
    with pytest.raises(UserError, match="is damaged"):
        read_placement(path, SHAPE, 2, draft=False)
