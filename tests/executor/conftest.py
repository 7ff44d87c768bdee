"""A four-layer checkpoint (three GDN layers, one full-attention layer) and what the tests ask of it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from rocm_serve.types import SamplingParams
from tests.executor.generate import Requests
from tests.made import small_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_checkpoint(tmp_path_factory.mktemp("executor") / "tiny", "text-bf16", "bf16", seed=11)


@pytest.fixture(scope="session")
def mixed_requests() -> Requests:
    """Greedy and sampled, scored and not, of many lengths; three of them longer than a chunk."""
    draw = random.Random(5)
    lengths = {"a": 1, "b": 3, "c": 63, "d": 64, "e": 65, "f": 150, "g": 9, "h": 31}
    requests = {}
    for number, (name, length) in enumerate(lengths.items()):
        prompt = tuple(draw.randrange(2000) for _ in range(length))
        params = SamplingParams(
            max_tokens=0 if name == "g" else 7,
            temperature=0.0 if number % 2 == 0 else 0.8,
            top_p=0.9 if name in "dh" else 1.0,
            presence_penalty=0.5 if name in "bd" else 0.0,
            seed=number,
            logprobs=2,
            prompt_logprobs=1 if name in "bdfg" else None,
        )
        requests[name] = (prompt, params)
    return requests
