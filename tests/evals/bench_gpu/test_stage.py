"""What the benchmark refuses before it runs anything, on a card that is not here."""

from __future__ import annotations

import pytest
import torch

from evals.bench_gpu import stage
from rocm_serve.errors import UserError
from rocm_serve.executor import device
from rocm_serve.ops import hip_library
from rocm_serve.platform.facts import GpuFacts


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    card = GpuFacts(kind="cuda", arch="sm_90", num_gpus=1, compute_units=132, hbm_bytes=150 << 30, name="H200")
    for module in (stage, device):
        monkeypatch.setattr(module, "gpus_seen_by_torch", lambda: card)
    monkeypatch.setattr(stage, "device_here", lambda: torch.device("cuda:0"))


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize("why", [None, "was not built"])
def test_providers_are_asked_of_every_shape_and_not_loaded(why: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hip_library, "why_missing", lambda: why)
    monkeypatch.setattr(hip_library, "loaded_library", lambda: pytest.fail("it was loaded"))
    wish = {"rms_norm": "hip"}
    if why is None:
        stage.check_ops(["tiny", "q35tp1"], wish)
    else:
        with pytest.raises(UserError, match="--op rms_norm=hip: hip was not built"):
            stage.check_ops(["tiny", "q35tp1"], wish)


@pytest.mark.usefixtures("h200")
def test_ops_that_the_steps_do_not_call_may_be_named() -> None:
    stage.check_ops(["tiny"], {"gdn_extend": "triton", "quantise_rows": "reference"})
