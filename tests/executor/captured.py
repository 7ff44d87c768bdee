"""Frames of the tests of captured steps on a GPU, with drafts and without."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TypeVar

import msgspec
import pytest
import torch

from rocm_serve.config.schema import DeviceName, Resolved
from rocm_serve.executor.loaded_stage import LoadedStage
from rocm_serve.executor.loading import load_stage_model
from rocm_serve.executor.runner import StageRunner
from rocm_serve.parallel.comm import SoloComm
from rocm_serve.parallel.mesh import Mesh

NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
    pytest.mark.filterwarnings("ignore:::triton"),
]
GPU: DeviceName = "rocm" if torch.version.hip else "cuda"
R = TypeVar("R")


def stage_of(wish: Resolved, rank: int) -> tuple[LoadedStage, StageRunner]:
    """Return one stage alone, its graphs captured up to as many requests as are wished for."""
    on_the_first_gpu = msgspec.structs.replace(wish, first_device=-rank)
    stage = load_stage_model(on_the_first_gpu, Mesh(1, wish.pp).coord(rank), SoloComm())
    runner = stage.runner(num_pages=64, num_slots=wish.graph_max_batch)
    ready = stage.capture(runner, lambda: None)
    assert ready.graph_max_batch == wish.graph_max_batch, ready.graphs
    return stage, runner


def rows_of(stage: LoadedStage, count: int) -> torch.Tensor | None:
    """Return rows as the stage before sends them, always the same ones."""
    if stage.coord.first_stage:
        return None
    g = torch.Generator("cuda").manual_seed(count)
    return torch.randn(count, stage.facts.hidden_size, generator=g, device="cuda").to(stage.dtype)


def same(one: object, other: object) -> bool:
    """Whether what two steps have given is the same to the bit."""
    both = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
    return torch.equal(one, other) if both else one == other  # type: ignore[arg-type]


def waits_in(step: Callable[[], R]) -> tuple[R, list[str]]:
    """Run a step; return what it gave, and the host's waits for the device in it."""
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            out = step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    said = [str(one.message) for one in seen]
    return out, [one for one in said if "synchronizing CUDA operation" in one]
