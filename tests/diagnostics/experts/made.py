"""Count files for tests."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from rocm_serve.diagnostics.experts.counts import FORMAT, CountFile, LayerCount, file_of_rank
from rocm_serve.parallel.expert_placement import MoeShape

SHAPE = MoeShape(architecture="Qwen3_5MoeForCausalLM", num_layers=4, num_experts=16, top_k=4)


def layer_count(rng: random.Random, tokens: int, shape: MoeShape = SHAPE) -> LayerCount:
    """Choose as a skewed router does."""
    weights = [1 / (1 + n) for n in range(shape.num_experts)]
    rng.shuffle(weights)
    chosen = [0] * shape.num_experts
    for _ in range(tokens):
        picked: set[int] = set()
        while len(picked) < shape.top_k:
            picked.add(rng.choices(range(shape.num_experts), weights)[0])
        for expert in picked:
            chosen[expert] += 1
    return LayerCount(tokens=tokens, chosen=tuple(chosen))


def count_file(rank: int = 0, *, seed: int = 0, tokens: int = 50, **changes: Any) -> CountFile:
    """What rank `rank` of --tp 2 --pp 1 leaves with a scattered exchange."""
    rng = random.Random(1000 * seed + rank)
    values: dict[str, Any] = {
        "format": FORMAT,
        "version": 1,
        "served": "tiny",
        "model": SHAPE,
        "tp": 2,
        "pp": 1,
        "rank": rank,
        "stage": 0,
        "counting": (0, 1),
        "layers": {layer: layer_count(rng, tokens) for layer in range(4)},
    }
    return CountFile(**{**values, **changes})


def write_pair(folder: Path, name: str = "counts.json", **changes: Any) -> tuple[CountFile, CountFile]:
    pair = count_file(0, **changes), count_file(1, **changes)
    for one in pair:
        one.write(file_of_rank(folder / name, one.rank))
    return pair
