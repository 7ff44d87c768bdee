"""A start with providers that have to show what they can: before a weight is read, in another process, remembered."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from rocm_serve.errors import UserError
from rocm_serve.executor import loading, probe_node
from rocm_serve.executor.loaded_stage import LoadedStage
from rocm_serve.executor.loading import load_stage_model
from rocm_serve.ops.contract import layout_tag
from rocm_serve.parallel.comm import SoloComm
from rocm_serve.parallel.mesh import Mesh
from tests.executor.wishes import resolved
from tests.ops.probing.providers import TABLE, TURNED

SMALL = {"chunked_prefill_size": 16, "max_running_requests": 4}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*args: object) -> NoReturn:
        raise AssertionError("a weight was read")

    monkeypatch.setattr(loading, "load_stage", read)


@pytest.fixture
def no_children(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*args: object, **kwargs: object) -> NoReturn:
        raise AssertionError("a process was started")

    monkeypatch.setattr(probe_node.subprocess, "Popen", start)


def load(path: Path, op: dict[str, str], table: str = TABLE, **changes: Any) -> LoadedStage:
    wish = resolved(model=str(path), op=op, **SMALL | changes)
    return load_stage_model(wish, Mesh(1, 1).coord(0), SoloComm(), table=table)


@pytest.mark.usefixtures("no_children")
@pytest.mark.parametrize("table", [loading.PRODUCT_TABLE, TABLE])
@pytest.mark.parametrize("op", [{}, {"rms_norm": "reference", "layers.1.linear": "reference"}])
def test_a_cpu_with_references_starts_no_process(
    checkpoints: dict[str, Path], op: dict[str, str], table: str, own_cache: Path
) -> None:
    load(checkpoints["text-fp8"], op, table)
    assert not own_cache.exists()


def test_a_wished_provider_is_probed_once_and_remembered(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, op = checkpoints["text-bf16"], {"layers.1.linear": "turning", "rms_norm": "good"}
    with caplog.at_level("INFO"):
        stage = load(path, op)
    probes = [line for line in caplog.messages if line.startswith("probe of")]
    assert len(probes) == 2 and all("calls, relative L2 up to" in line for line in probes)
    lines = [line for line in caplog.messages if line.startswith("op ")]
    assert "op rms_norm: good" in lines and "op layers.1.linear: turning" in lines
    assert isinstance(stage.model, torch.nn.Module)
    tags = {name: layout_tag(p) for name, p in stage.model.named_parameters()}
    assert {n for n, tag in tags.items() if tag == TURNED} == {
        f"model.layers.1.{name}.weight"
        for name in (
            *("linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba", "linear_attn.out_proj", "mlp.gate"),
            *("mlp.shared_expert_gate", "mlp.shared_expert.gate_up_proj", "mlp.shared_expert.down_proj"),
        )
    }
    held = sum(tensor.nbytes for tensor in stage.model.state_dict().values())
    assert held == stage.weight_bytes, "prepared weights are counted as plain ones are"

    def start(*args: object, **kwargs: object) -> NoReturn:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", start)
    load(path, op)


def test_a_kernel_that_its_probe_refuses_where_it_was_preferred_is_warned_of_and_told_to_the_core(
    checkpoints: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING"):
        stage = load(checkpoints["text-bf16"], {}, preferred={"rms_norm": "no_plus_one"})
    (said,) = [one for one in caplog.messages if one.startswith("op ")]
    assert said.startswith(
        "op rms_norm runs as its reference in torch (slow): no_plus_one failed its probe: 1 x 256: rel"
    )
    ready = stage.capture(stage.runner(num_pages=9, num_slots=2), lambda: None)
    assert ready.by_reference == {"rms_norm": said.removeprefix("op rms_norm ")}


def test_an_op_that_the_model_never_calls_is_no_reason_for_a_warning(
    checkpoints: dict[str, Path], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    wish = {"fp8_linear": "scale_divided", "linear": "turning"}
    refused = dict.fromkeys(wish.items(), "failed its probe: cannot be loaded")
    monkeypatch.setattr(loading, "settle", lambda *args: refused)
    with caplog.at_level("WARNING"):
        stage = load(checkpoints["text-bf16"], {}, preferred=wish)
    assert [one.split()[1] for one in caplog.messages if one.startswith("op ")] == ["linear"]
    ready = stage.capture(stage.runner(num_pages=9, num_slots=2), lambda: None)
    assert list(ready.by_reference) == ["linear"]


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("op", "words"),
    [
        ({"rms_norm": "no_plus_one"}, r"--op rms_norm=no_plus_one: no_plus_one failed its probe: 1 x 256: relative L2"),
        ({"layers.0.fp8_linear": "scale_divided"}, "scale_divided failed its probe: 1 x .*: relative L2"),
        ({"rms_norm": "crashes"}, "crashes failed its probe: 0 x 256: the probe's process ended with signal SIGABRT"),
    ],
    ids=["a norm without + 1", "a scale that divides", "a crash"],
)
def test_a_planted_fault_of_a_provider_ends_the_start_before_a_weight_is_read(
    checkpoints: dict[str, Path], op: dict[str, str], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        load(checkpoints["vl-fp8"], op)


@pytest.mark.usefixtures("no_weights", "no_children")
def test_weights_that_cannot_be_laid_out_are_refused_before_one_is_read(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "settle", lambda *args: {})
    path = checkpoints["text-bf16"]
    plain = resolved(model=str(path), op={}, **SMALL)
    needed = 1 << 40

    def allowed(*args: object) -> tuple[int, int]:
        return needed, 0

    monkeypatch.setattr(loading, "_allowed_and_held", allowed)
    monkeypatch.setattr(loading, "_fill", lambda *args: None)
    weights = load_stage_model(plain, Mesh(1, 1).coord(0), SoloComm(), table=TABLE).weight_bytes
    monkeypatch.setattr(loading.step_memory, "step_bytes", lambda *args, **kwargs: 0)
    needed = weights + 1000
    load(path, {})
    with pytest.raises(UserError, match="laying them out for their kernels .* more for a moment"):
        load(path, {"linear": "turning"})
