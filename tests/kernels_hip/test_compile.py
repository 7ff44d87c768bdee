"""The sources of kernels_hip by compilers other than the trials': a wave of 32 lanes on AMD, and NVIDIA's."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from evals.gfx.toolchain import compile_device
from kernels_hip import build
from tests.evals.gfx.emulator.machine import needs_clang

SOURCES = build.kernel_sources()
NVCC = build.find_compiler("cuda")


@needs_clang
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_a_wave_of_32_lanes_compiles_without_a_warning_or_scratch(tmp_path: Path, source: Path) -> None:
    out = tmp_path / "kernel.co"
    compile_device(source, "gfx1201", out, "-Werror")
    notes = subprocess.run(["llvm-readelf-22", "--notes", out], check=True, capture_output=True, text=True).stdout
    sizes = dict.fromkeys(re.findall(r"\.(wavefront_size|private_segment_fixed_size|vgpr_spill_count): +(\d+)", notes))
    assert set(sizes) == {("wavefront_size", "32"), ("private_segment_fixed_size", "0"), ("vgpr_spill_count", "0")}


@pytest.mark.skipif(NVCC is None, reason="no nvcc here")
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_nvcc_compiles_for_sm_90_without_a_spill(tmp_path: Path, source: Path) -> None:
    flags = ("-O3", "-std=c++17", "-fmad=false", "-arch=sm_90", "-cubin", "-Xptxas", "-v", "-x", "cu")
    command = [str(NVCC), *flags, f"-I{build.ROOT / 'include'}", str(source), "-o", str(tmp_path / "kernel.cubin")]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert "warning" not in run.stderr
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", run.stderr)]
    kernels = re.findall(r"Compiling entry function '(\w+)'", run.stderr)
    assert len(registers) == len(kernels) > 0 and max(registers) <= 64
    assert not re.search(r"[1-9]\d* bytes (spill|stack frame)", run.stderr)


def test_every_entry_point_is_in_a_source() -> None:
    from rocm_serve.ops.hip_library import ENTRY_POINTS

    text = " ".join(path.read_text(encoding="utf-8") for path in SOURCES)
    declared = dict(re.findall(r'extern "C" int (rs_\w+)\(const (\w+)\* call\)', text))
    assert declared.keys() == ENTRY_POINTS.keys()
    letters = {"void*": "P", "i64": "q", "float": "f", "int": "i"}
    for name, call in declared.items():
        found = re.search(rf"struct {call} {{(.*?)\n}};", text, re.DOTALL)
        assert found is not None, call
        fields = re.findall(r"^ +(?:const )?(\S+) ([^;]+);", found[1], re.MULTILINE)
        assert "".join(letters[kind] * (names.count(",") + 1) for kind, names in fields) == ENTRY_POINTS[name], name
