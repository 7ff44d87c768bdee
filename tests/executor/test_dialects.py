"""A model served in gfx942's FP8 dialect answers with the bits of the other one. No GPU: the references read both."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rocm_serve.executor import loaded_stage, loading
from rocm_serve.executor.local import LocalExecutor
from rocm_serve.ops.fp8 import FNUZ
from rocm_serve.parallel.comm import SoloComm
from rocm_serve.parallel.mesh import Mesh
from rocm_serve.types import SamplingParams
from tests.executor.generate import Answer, Requests, session
from tests.executor.wishes import resolved

PARAMS = SamplingParams(max_tokens=5, temperature=0.0, logprobs=3, prompt_logprobs=1)
REQUESTS: Requests = {"long": (tuple(range(3, 90)), PARAMS), "short": ((17, 4, 900), PARAMS)}


def answers(path: Path, activation: str) -> dict[str, Answer]:
    wish = resolved(model=str(path), kv_cache_dtype="fp8_e4m3", fp8_activation=activation)
    with session(LocalExecutor(wish)) as running:
        return running.generate(REQUESTS)


def speak_fnuz(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (loading, loaded_stage):
        monkeypatch.setattr(module, "dialect_of", lambda device: "fnuz")


@pytest.mark.parametrize("activation", ["bf16", "fp8_1x128"])
def test_both_dialects_answer_with_the_same_bits(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch, activation: str
) -> None:
    expected = answers(checkpoints["text-fp8"], activation)
    speak_fnuz(monkeypatch)
    assert answers(checkpoints["text-fp8"], activation) == expected


def test_weights_and_pages_are_in_the_dialect_of_the_device(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    speak_fnuz(monkeypatch)
    with caplog.at_level("INFO"):
        stage = loading.load_stage_model(
            resolved(model=str(checkpoints["text-fp8"]), kv_cache_dtype="fp8_e4m3"),
            Mesh(1, 1).coord(0),
            SoloComm(),
        )
    assert isinstance(stage.model, torch.nn.Module)
    dtypes = {tensor.dtype for tensor in stage.model.state_dict().values()}
    assert FNUZ in dtypes and torch.float8_e4m3fn not in dtypes
    runner = stage.runner(num_pages=2, num_slots=1)
    assert {pages.dtype for pages in runner.cache.k_pages.values()} == {FNUZ}
    assert "rank 0: FP8 weights are turned from e4m3fn into e4m3fnuz as they are read" in caplog.messages
