"""doctor --kernels on a machine without a GPU, about a GPU that is elsewhere, and on one that is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from rocm_serve.config.schema import ServeConfig
from rocm_serve.errors import UserError
from rocm_serve.executor import kernel_report
from rocm_serve.executor.kernel_report import KernelReport, OpReport
from rocm_serve.ops import bind
from rocm_serve.ops.bind import OPS, Binding
from rocm_serve.platform.facts import GpuFacts
from rocm_serve.platform.gpus import GPUS
from rocm_serve.platform.table import provider_order
from tests.ops.probing.providers import TABLE

H200 = GpuFacts(kind="cuda", arch="sm_90", num_gpus=1, compute_units=132, hbm_bytes=150 << 30, name="H200")


def report(config: ServeConfig | None = None, gpu: str | None = None, **options: Any) -> KernelReport:
    return kernel_report.kernel_report(config, GPUS[gpu] if gpu else None, **options)


def of(made: KernelReport, op: str) -> OpReport:
    return next(one for one in made.ops if one.op == op)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_report, "gpus_seen_by_torch", lambda: GpuFacts(kind="none"))


@pytest.mark.usefixtures("no_gpu")
def test_without_a_gpu_it_says_what_a_cpu_runs_and_what_it_could_not_see() -> None:
    made = report()
    assert [one.op for one in made.ops] == list(OPS)
    assert {one.provider for one in made.ops} == {"reference"}
    assert (made.arch, made.seen, made.fp8_dialect, made.fp8_activation) == ("cpu", False, "fn", "bf16")
    assert len(made.not_seen) == 2
    assert "a GPU: torch" in made.not_seen[0] and "--gpu NAME" in made.not_seen[0]
    assert "without --model DIR" in made.not_seen[1]
    assert made.versions["torch"] and made.versions["amd-aiter"]


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize(("gpu", "dialect"), [("mi308x", "fnuz"), ("mi355x", "fn"), ("h200", "fn")])
def test_about_a_gpu_elsewhere_it_names_every_provider_and_why_not(
    checkpoints: dict[str, Path], gpu: str, dialect: str
) -> None:
    made = report(ServeConfig(model=str(checkpoints["vl-fp8"]), tp=2), gpu)
    assert not made.seen and made.fp8_dialect == dialect and made.gpu == GPUS[gpu].name
    for one in made.ops:
        tried = (*(name for name, _ in one.refused), one.provider)
        order = provider_order(one.op, GPUS[gpu].arch)
        assert tried == order[: len(tried)], "up to the one that is bound, in order"
        assert one.probe.startswith(("not run", "needs none: it is what others", "needs none: this model does not"))
        assert bool(one.shapes) == one.called
    not_called = {one.op for one in made.ops if not one.called}
    assert not_called == {"quantise_rows", "gdn_extend"}, "an exchange that sends rows calls the one, drafts the other"
    assert any("no kernel was run" in line for line in made.not_seen)
    experts = of(made, "moe_experts").shapes
    assert [one.shape for one in experts] == ["256, 3 of 8 experts of 256"]
    assert experts[0].rows == (0, 1, 16, 32, 33, 64, 128, 304, 512, 576)


def test_a_reference_that_runs_because_a_probe_refused_the_kernel_is_called_slow() -> None:
    line = Binding("moe_experts", "reference", (("triton", "failed its probe: 528 x 256: off"),), fell_back=True)
    made = kernel_report._op(line, None, {}, True)
    assert made.probe == "needs none; slow: a probe refused the kernel that would be bound"
    assert made.refused == line.refused


@pytest.mark.usefixtures("no_gpu")
def test_a_wish_for_an_op_that_the_model_does_not_call_is_told_not_refused(checkpoints: dict[str, Path]) -> None:
    wishes = {"gdn_extend": "triton", "layers.0.quantise_rows": "reference"}
    made = report(ServeConfig(model=str(checkpoints["vl-fp8"]), op=wishes), "h200")
    assert of(made, "gdn_extend").provider == "triton"
    for name in wishes:
        assert of(made, name).probe == "needs none: this model does not call it"


@pytest.mark.usefixtures("no_gpu")
def test_shapes_are_those_of_one_rank(checkpoints: dict[str, Path]) -> None:
    one, two = (report(ServeConfig(model=str(checkpoints["vl-fp8"]), tp=tp), "mi300x") for tp in (1, 2))
    shapes = [{s.shape for s in of(made, "fp8_linear").shapes} for made in (one, two)]
    assert shapes[0] != shapes[1] and len(shapes[0]) > 3
    shared = report(ServeConfig(model=str(checkpoints["vl-fp8"]), tp=2, ep=2), "mi300x")
    assert [s.shape for s in of(shared, "moe_experts").shapes] == ["256, 3 of 8 experts (4 of them here) of 512"]


@pytest.mark.usefixtures("no_gpu")
def test_with_drafts_their_rows_and_the_draft_layer_are_seen(checkpoints: dict[str, Path]) -> None:
    config = ServeConfig(model=str(checkpoints["text-fp8"]), max_running_requests=8)
    drafting = msgspec.structs.replace(config, speculative="mtp", draft_tokens=4)
    without, made = (report(one, "mi300x") for one in (config, drafting))
    assert of(made, "gdn_extend").called and of(made, "gdn_extend").shapes
    for op in ("gdn_decode", "causal_conv", "attention_decode"):
        assert {s.shape for s in of(without, op).shapes} < {s.shape for s in of(made, op).shapes}, op
    assert any("rows (1, 5, 9), (1, 1, 5) committed" in s.shape for s in of(made, "gdn_decode").shapes)
    assert any(s.shape.startswith("rows (5, 1, 5) after (0, 127, ") for s in of(made, "attention_decode").shapes)
    hidden = 256
    assert f"[{hidden}, {2 * hidden}]" in {s.shape for s in of(made, "linear").shapes}, "mtp.fc"
    most = [max(of(one, "rms_norm").shapes[0].rows) for one in (without, made)]
    assert most[1] - most[0] == 8 * 4


@pytest.mark.usefixtures("no_gpu")
def test_a_model_that_cannot_be_cut_so_is_refused_as_a_start_would(checkpoints: dict[str, Path]) -> None:
    with pytest.raises(UserError, match="tp 3 cannot be used"):
        report(ServeConfig(model=str(checkpoints["text-bf16"]), tp=3), "mi300x")
    with pytest.raises(UserError, match="no config.json"):
        report(ServeConfig(model="nowhere"))


@pytest.mark.usefixtures("no_gpu")
def test_a_config_without_weights_is_enough(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((checkpoints["vl-fp8"] / "config.json").read_bytes())
    alone, whole = (report(ServeConfig(model=str(path)), "mi300x") for path in (tmp_path, checkpoints["vl-fp8"]))
    assert of(alone, "fp8_linear").shapes == of(whole, "fp8_linear").shapes


class OnCpu(kernel_report.NodeProber):
    """A prober that runs what should run on the GPU on the CPU."""

    def __init__(self, **values: Any) -> None:
        super().__init__(**values | {"device": "cpu", "cache_dir": None, "call_s": 6.0})


def test_on_a_gpu_that_is_there_kernels_are_run_and_refused(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_report, "gpus_seen_by_torch", lambda: H200)
    monkeypatch.setattr(kernel_report, "NodeProber", OnCpu)
    order = {"rms_norm": ("no_plus_one", "crashes", "good", "reference")}
    monkeypatch.setattr(bind, "provider_order", lambda op, arch: order.get(op, ("reference",)))
    config = ServeConfig(model=str(checkpoints["text-bf16"]), chunked_prefill_size=16, max_running_requests=4)
    made = report(config, table=TABLE)
    norm = of(made, "rms_norm")
    assert made.seen and norm.provider == "good" and norm.probe == "passed: 3 calls, relative L2 up to 0.0e+00"
    assert [name for name, _ in norm.refused] == ["no_plus_one", "crashes"]
    assert "failed its probe: 1 x 256: relative L2" in norm.refused[0][1] and "SIGABRT" in norm.refused[1][1]
    assert made.not_seen == ("collectives, device graphs and speed: a probe looks at results only",)
    still = report(config, table=TABLE, run=False)
    assert of(still, "rms_norm").provider == "no_plus_one" and of(still, "rms_norm").probe == "not run"
    assert any("--no-run" in line for line in still.not_seen)
