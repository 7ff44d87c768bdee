"""The probe on the GPU of the day: every provider that is bound there passes at the shapes of Qwen3.8-2.4T at TP 8."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from rocm_serve.config.schema import ServeConfig
from rocm_serve.executor import probe_node
from rocm_serve.executor.kernel_report import kernel_report
from rocm_serve.executor.probe_node import NodeProber
from rocm_serve.ops.bind import OPS, REFERENCE
from rocm_serve.ops.facts import LinearShape, OpFacts
from rocm_serve.platform.facts import fp8_dialect
from rocm_serve.platform.probe import gpus_seen_by_torch
from rocm_serve.platform.table import provider_order
from tests.ops.probing import providers
from tests.ops.probing.facts import tiny_facts

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]
DENSE = ((4608, 8192), (8192, 2048), (32, 8192), (512, 8192), (1, 8192), (8192, 256), (31040, 8192))
BLOCKS = ((4608, 4096), (4096, 2048))  # of the 397B model, whose dense layers are FP8


def qwen38_at_tp8(kv_dtype: str) -> OpFacts:
    gpus = gpus_seen_by_torch()
    return tiny_facts(
        arch=gpus.arch,
        compute_units=gpus.compute_units,
        fp8_dialect=fp8_dialect("rocm" if gpus.kind == "rocm" else "cuda", gpus.arch),
        kv_dtype=kv_dtype,
        tp=8,
        hidden_size=8192,
        heads=8,
        kv_heads=1,
        head_dim=256,
        rotary_dim=64,
        key_heads=2,
        value_heads=16,
        key_dim=128,
        value_dim=128,
        num_experts=512,
        top_k=10,
        expert_width=256,
        mlp_width=256,
        linears=tuple(LinearShape(*shape, False) for shape in DENSE) + tuple(LinearShape(*s, True) for s in BLOCKS),
        max_rows=576,
        max_running=64,
        max_model_len=8192,
    )


def prober(run_dir: Path, facts: OpFacts, **changes: object) -> NodeProber:
    return NodeProber(
        ops=providers.OPS,
        facts=facts,
        device="cuda:0",
        machine="the GPU of the day",
        run_dir=run_dir,
        table=providers.TABLE,
        **changes,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "fp8_e4m3"])
def test_every_provider_that_is_bound_here_passes_and_is_remembered(tmp_path: Path, kv_dtype: str) -> None:
    facts = qwen38_at_tp8(kv_dtype)
    tasks = [
        (name, provider)
        for name, op in OPS.items()
        for provider in provider_order(name, facts.arch)
        if provider != REFERENCE and op.providers[provider].refusal(facts.arch, facts.mapping()) is None
    ]
    assert tasks, "no provider but the reference accepts this GPU"
    start = time.monotonic()
    node = prober(tmp_path, facts, cache_dir=tmp_path / "cache")
    verdicts = node.probe(tasks)
    print(f"\n{len(tasks)} providers probed in {time.monotonic() - start:.1f} s, {node.children} processes")
    for task, verdict in verdicts.items():
        print(f"{task[0]:<18} {task[1]:<8} {verdict.calls:>3} calls {verdict.error:.1e} {verdict.seconds:6.1f} s")
    assert {task: v.refused for task, v in verdicts.items() if v.refused is not None} == {}
    assert node.children == 1
    again = prober(tmp_path, facts, cache_dir=tmp_path / "cache")
    assert again.probe(tasks) == verdicts and again.children == 0


def test_wrong_crashing_and_hanging_providers_are_told_apart_on_the_gpu(tmp_path: Path) -> None:
    facts = qwen38_at_tp8("bfloat16")
    names = ["good", "one_percent", "no_plus_one", "one_row", "crashes", "raises", "hangs"]
    node = prober(tmp_path, facts, call_s=20.0)
    said = {task[1]: verdict.refused for task, verdict in node.probe([("rms_norm", name) for name in names]).items()}
    assert said["good"] is None
    assert "relative L2" in str(said["one_percent"]) and "relative L2" in str(said["no_plus_one"])
    assert "row 575 has relative L2" in str(said["one_row"])
    assert "SIGABRT" in str(said["crashes"]) and "no kernel image" in str(said["raises"])
    assert "no sign of life for 20 s" in str(said["hangs"])


def test_a_scale_that_divides_is_seen_on_the_gpu(tmp_path: Path) -> None:
    node = prober(tmp_path, qwen38_at_tp8("bfloat16"))
    verdict = node.probe([("fp8_linear", "scale_divided")])["fp8_linear", "scale_divided"]
    assert "relative L2" in str(verdict.refused)


def test_the_doctor_sees_this_gpu_and_runs_its_kernels(
    checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = kernel_report(ServeConfig(model=str(checkpoints["vl-fp8"])), None)
    assert made.seen and made.gpu
    bound = {one.op: (one.provider, one.probe) for one in made.ops if one.called}
    print(bound)
    assert {one.probe for one in made.ops if not one.called} <= {"needs none: this model does not call it"}
    assert all(probe.startswith("passed: ") for provider, probe in bound.values() if provider != REFERENCE)
    assert not any("a GPU" in line for line in made.not_seen)
    assert (tmp_path / "rocm_serve" / "probes").exists() == any(p != REFERENCE for p, _ in bound.values())
    assert probe_node.CALL_S > 60
