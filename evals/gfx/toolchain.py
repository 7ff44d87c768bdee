"""The compilers that are used where there is no GPU: clang and LLVM's tools, installed by install.sh."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from functools import cache
from pathlib import Path

from evals.gfx.registry import Arch
from kernels_hip.build import ROOT, kernel_sources

VERSION = 22  # the first that knows gfx950
CLANG, OBJDUMP = f"clang++-{VERSION}", f"llvm-objdump-{VERSION}"
PROGRAMS = (CLANG, OBJDUMP, f"ld.lld-{VERSION}")
HOST = Path(__file__).resolve().parent / "hip_host.cpp"

_COMMON = ("-x", "hip", "-DRS_OFFLINE", "-nogpuinc", "-nogpulib", "-O3", "-std=c++17", "-ffp-contract=off", "-Wall")
# The host's half is run on this machine: no library of C or C++ is needed by it.
_HOST = ("--cuda-host-only", "-fPIC", "-fno-exceptions", "-fno-rtti", "-fno-stack-protector")


class ToolError(RuntimeError):
    """A program is missing or failed; one sentence and its words."""


def missing_programs() -> list[str]:
    """Name what is not on PATH."""
    return [name for name in PROGRAMS if shutil.which(name) is None]


def need_programs() -> None:
    """Raise ToolError, with the command that installs them, unless all programs are there."""
    if missing_programs():
        raise ToolError(f"{', '.join(missing_programs())}: not found; bash evals/gfx/install.sh installs them")


@cache
def clang_version() -> str:
    """Return clang's own first line."""
    return run([CLANG, "--version"]).splitlines()[0]


def run(command: list[str]) -> str:
    """Run a program and return its output. Errors: ToolError with what it said."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ToolError(f"{command[0]} ended with {done.returncode}: {(done.stderr or done.stdout).strip()[-3000:]}")
    return done.stdout


def compile_device(source: Path, arch: str, out: Path, *flags: str) -> None:
    """Compile one .hip file to a code object."""
    include = f"-I{ROOT / 'include'}"
    target = (f"--offload-arch={arch}", "--cuda-device-only", "--no-gpu-bundle-output")
    run([CLANG, *_COMMON, *target, include, *flags, str(source), "-o", str(out)])


def device_objects(arch: Arch, folder: Path) -> list[Path]:
    """Compile every HIP source of kernels_hip for `arch` into `folder`."""
    made = []
    for source in kernel_sources():
        out = folder / f"{source.stem}_{arch}.co"
        if not out.exists():
            compile_device(source, arch, out)
        made.append(out)
    return made


def host_library(folder: Path) -> Path:
    """Compile the entry points of kernels_hip, as they are, for this CPU; their launches go to hip_host.cpp."""
    sources = [*kernel_sources(), HOST]
    out = folder / f"entry_points_{hashlib.sha256(repr(sources).encode()).hexdigest()[:8]}.so"
    if not out.exists():
        objects = []
        binary = folder / "no_device_code"  # the place of the GPU's code, which the emulator is given apart
        binary.write_bytes(b"none")
        place = ("-Xclang", "-fcuda-include-gpubinary", "-Xclang", str(binary))
        for source in sources:
            made = folder / f"{source.stem}.o"
            run([CLANG, *_COMMON, *_HOST, *place, f"-I{ROOT / 'include'}", "-c", str(source), "-o", str(made)])
            objects.append(str(made))
        run([f"ld.lld-{VERSION}", "-shared", *objects, "-o", str(out)])
    return out
