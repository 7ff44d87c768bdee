"""The list of trials: complete, recorded, and able to fail. What all of them say: make compile-gfx, make emulate."""

from __future__ import annotations

import copy
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from evals.gfx import evidence, records, toolchain
from evals.gfx.__main__ import main
from evals.gfx.device import Device
from evals.gfx.evidence import page
from evals.gfx.hip_device import library_of
from evals.gfx.judge import run_trial
from evals.gfx.kernels import NOT_EMULATED, TRIALS
from evals.gfx.registry import ARCHS, Arch, NotEmulated, Trial
from kernels_hip import build
from rocm_serve.ops.bind import OPS
from rocm_serve.ops.gated_rms_norm import hip as gated_hip
from rocm_serve.ops.rms_norm import hip
from tests.evals.gfx.emulator.machine import needs_clang
from tests.ops.interpreted import LIMITS as ROWS_INTERPRETED
from tests.ops.interpreted_experts import LIMITS as EXPERTS_INTERPRETED
from tests.ops.interpreted_sampling import LIMITS as SAMPLING_INTERPRETED
from tests.ops.interpreted_sequences import LIMITS as SEQUENCES_INTERPRETED

BY_NAME = {trial.name: trial for trial in TRIALS}
SMALL = ("rms_norm hip 9 x 136", "add_rms_norm hip 9 x 264", "gated_rms_norm hip 3 x 5 x 40 sigmoid")


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the HIP kernels are compiled once for all tests of this file."""
    return tmp_path_factory.mktemp("objects")


def test_names_are_unique() -> None:
    assert len(BY_NAME) == len(TRIALS)


def test_every_provider_of_kernels_has_a_trial_or_a_reason() -> None:
    tried = {(trial.op, trial.provider) for trial in TRIALS} | {(e.op, e.provider) for e in NOT_EMULATED}
    ours = {(name, provider) for name, op in OPS.items() for provider in op.providers if provider in ("hip", "triton")}
    assert ours <= tried, f"no trial in evals/gfx/kernels_*.py: {sorted(ours - tried)}"


def test_every_hip_kernel_has_a_trial() -> None:
    sources = "\n".join(path.read_text(encoding="utf-8") for path in build.kernel_sources())
    written = set(re.findall(r"__global__ void __launch_bounds__\(\d+\)\s+(\w+)\(", sources))
    written |= set(re.findall(r"^NORM_KERNEL\((\w+),", sources, re.MULTILINE))
    widths = re.findall(r"^  NORM_KERNEL\(NAME##(\w+),", sources, re.MULTILINE)
    stems = re.findall(r"^NORM_KERNELS\((\w+),", sources, re.MULTILINE)
    written |= {stem + width for stem in stems for width in widths}
    assert written == {kernel for trial in TRIALS if trial.provider == "hip" for kernel in trial.kernels}
    assert len(written) == 19


def test_every_kernel_is_recorded_as_emulated_or_has_a_reason() -> None:
    assert records.missing_levels(TRIALS, NOT_EMULATED, records.read(records.EMULATED)) == []


def test_a_kernel_that_was_not_emulated_or_a_reason_that_is_idle_is_told() -> None:
    trial = replace(TRIALS[0], kernels=("a_kernel",), provider="hip")
    excuse = NotEmulated(trial.op, "hip", "a_kernel", "for a reason")
    half = {"hip a_kernel": {"gfx942": {"case": {}}}}
    (said,) = records.missing_levels([trial], [], half)
    assert said.startswith("hip a_kernel: not emulated on gfx950")
    assert records.missing_levels([trial], [excuse], half) == []
    (said,) = records.missing_levels([trial], [excuse], {"hip a_kernel": {"gfx942": {}, "gfx950": {}}})
    assert "listed in NOT_EMULATED, and emulated" in said


def test_the_page_of_evidence_is_what_the_tables_say() -> None:
    assert records.EVIDENCE.read_text(encoding="utf-8") == page(TRIALS, NOT_EMULATED), (
        "python -m evals.gfx table --write"
    )


def test_levels_that_are_recorded_name_kernels_that_exist() -> None:
    known = records.every_kernel(TRIALS, NOT_EMULATED)
    for level, recorded in records.read(records.LEVELS).items():
        assert level in ("interpreted", "cuda", "rocm") and set(recorded) <= set(known), level
    names = (*ROWS_INTERPRETED, *EXPERTS_INTERPRETED, *SEQUENCES_INTERPRETED, *SAMPLING_INTERPRETED)
    interpreted = {name.split("_in_")[0].removesuffix("_fp8") for name in names}
    for kernel in records.read(records.LEVELS)["interpreted"]:
        assert interpreted & set(known[kernel].split(", ")), f"{kernel}: no op of it is interpreted in tests/ops"


def test_resources_that_changed_are_told() -> None:
    before = {"hip k": {"gfx942": {"case": [{"vgprs": 10}]}}}
    assert records.resource_differences(before, before) == []
    (said,) = records.resource_differences({"hip k": {"gfx942": {"case": [{"vgprs": 12}]}}}, before)
    assert '"vgprs": 12' in said and '"vgprs": 10' in said
    assert "not in resources.json" in records.resource_differences(before, {})[0]


def test_some_trials_written_leave_the_record_of_others() -> None:
    before = {
        "hip k": {"gfx942": {"one": [1], "other": [2]}, "gfx950": {"one": [3]}},
        "hip l": {"gfx942": {"one": [4]}},
    }
    kept = copy.deepcopy(before)
    found = {"hip k": {"gfx942": {"one": [9], "new": [8]}}, "hip m": {"gfx950": {"one": [7]}}}
    both = {"gfx942": {"one": [9], "other": [2], "new": [8]}, "gfx950": {"one": [3]}}
    assert records.merged(kept, found) == {"hip k": both, "hip l": before["hip l"], "hip m": found["hip m"]}
    assert kept == before and records.merged({}, found) == found


@needs_clang
@pytest.mark.parametrize("arch", ARCHS)
def test_small_trials_are_well_and_need_what_is_committed(objects: Path, arch: Arch) -> None:
    device = Device(arch, objects)
    verdicts = [run_trial(BY_NAME[name], device, seed=0) for name in SMALL]
    assert [fault for v in verdicts for fault in v.faults] == []
    assert all(v.instructions > 100 for v in verdicts)
    committed = records.read(records.RESOURCES)
    if committed["toolchain"]["clang"] == toolchain.clang_version():
        found = records.resource_table(verdicts, BY_NAME)
        assert records.resource_differences(found, committed["kernels"]) == []


@needs_clang
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("width", [64, 264, 4104])
def test_a_row_has_the_same_bits_alone_and_among_others(objects: Path, arch: Arch, width: int) -> None:
    device = Device(arch, objects)
    norm, add = (getattr(hip, f"make_{op}")(library_of(device)) for op in ("rms_norm", "add_rms_norm"))
    x, stream = (torch.randn(19, width).to(torch.bfloat16) for _ in range(2))
    weight = torch.randn(width).to(torch.bfloat16)
    more = {"eps": 1e-6, "plus_one": True}
    among, added = norm(x, weight, **more), add(x, stream.clone(), weight, **more)
    for at in (0, 7, 18):
        one = slice(at, at + 1)
        assert torch.equal(norm(x[one], weight, **more), among[one])
        assert torch.equal(add(x[one], stream[one].clone(), weight, **more), added[one])


@needs_clang
@pytest.mark.parametrize("arch", ARCHS)
def test_no_rows_launch_nothing(objects: Path, arch: Arch) -> None:
    device = Device(arch, objects)
    library = library_of(device)
    x, weight = torch.empty(0, 64, dtype=torch.bfloat16), torch.ones(64, dtype=torch.bfloat16)
    assert hip.make_rms_norm(library)(x, weight, eps=1e-6, plus_one=True).shape == (0, 64)
    assert hip.make_add_rms_norm(library)(x, x.clone(), weight, eps=1e-6, plus_one=True).shape == (0, 64)
    gated = gated_hip.make_gated_rms_norm(library)
    assert gated(x.view(0, 1, 64), x.view(0, 1, 64), weight, eps=1e-6, activation="silu").shape == (0, 1, 64)
    assert device.launched == {}


def test_what_was_run_on_a_gpu_is_recorded_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(records, "LEVELS", tmp_path / "levels.json")
    monkeypatch.setattr(evidence, "LEVELS", tmp_path / "levels.json")
    monkeypatch.setattr(records, "EVIDENCE", tmp_path / "evidence.md")
    assert main(["record", "cuda", "H200, 2e-4", "hip rms_norm_128", "hip gated*"]) == 0
    rows = [line for line in records.EVIDENCE.read_text(encoding="utf-8").splitlines() if "H200, 2e-4" in line]
    assert [row.split(" | ")[0] for row in rows] == ["| gated_rms_norm_128", "| gated_rms_norm_512", "| rms_norm_128"]
    assert main(["record", "rocm", "MI300X", "hip nothing"]) == 2
    assert "matches none of" in capsys.readouterr().err


FAULTS = {
    "the weight is not one more": ("rows.h", "plus_one ? scale[j] + 1.f : scale[j]", "scale[j]", SMALL[0]),
    "eps is left out": ("rows.h", "(float)(sum * inverse_width) + eps", "(float)(sum * inverse_width)", "eps matters"),
    "a lane's half is not added": ("rows.h", "int step = LANES / 2; step;", "int step = LANES / 4; step;", SMALL[0]),
    "rounded towards zero": ("gpu.h", "a + 0x7fffu + ((a >> 16) & 1u)", "a", SMALL[0]),
    "the last row is not written": ("rms_norm.hip", "asked < n.rows", "asked + 1 < n.rows", SMALL[0]),
    "the residual is not stored": ("rms_norm.hip", "if (exists) store16(stream, held[i]);", "", SMALL[1]),
    "the residual is normalised unrounded": ("rows.h", "x[j] += y[j];", "x[j] += y[j] * 1.01f;", SMALL[1]),
    "the gate before the norm": ("gated_rms_norm.hip", "* activate(g[j], n.activation)", "", SMALL[2]),
    "silu for sigmoid": ("gated_rms_norm.hip", "activation == kSilu ? g : 1.f", "g", SMALL[2]),
    "a chunk past the end": (
        "rms_norm.hip",
        "const bool live = exists && chunk < n.chunks;",
        "const bool live = exists;",
        SMALL[0],
    ),
}


@needs_clang
@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_planted_in_a_kernel_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    name, before, after, trial = FAULTS[fault]
    sources = tmp_path / "kernels_hip"
    for part in ("include", "impls"):
        shutil.copytree(build.ROOT / part, sources / part)
    (changed,) = sources.glob(f"*/**/{name}") if name.endswith(".hip") else sources.glob(f"include/{name}")
    text = changed.read_text(encoding="utf-8")
    assert before in text, "the kernel has changed: plant the fault anew"
    changed.write_text(text.replace(before, after), encoding="utf-8")
    monkeypatch.setattr(build, "ROOT", sources)
    monkeypatch.setattr(toolchain, "ROOT", sources)
    chosen: Trial = next(t for t in TRIALS if t.provider == "hip" and (t.name == trial or t.case == trial))
    found = run_trial(chosen, Device("gfx942", tmp_path), seed=0)
    assert found.faults and "launched" not in found.faults[0]
