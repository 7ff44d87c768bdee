"""Running single instructions and small programs in the emulator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evals.gfx.emulator import machine  # noqa: F401  loads the meanings
from evals.gfx.emulator.instruction import build, parse
from evals.gfx.emulator.machine import load_kernels
from evals.gfx.emulator.memory import Memory
from evals.gfx.emulator.wave import ALL, EXEC, Wave, Workgroup
from evals.gfx.toolchain import OBJDUMP, compile_device, missing_programs

ARCHS = ("gfx942", "gfx950")
needs_clang = pytest.mark.skipif(bool(missing_programs()), reason="no clang-22: bash evals/gfx/install.sh")


def wave(lds: int = 1024) -> Wave:
    """Return a wave with all lanes on."""
    w = Wave(Workgroup(Memory(), lds), 0)
    w.set_pair(EXEC, ALL)
    return w


def step(w: Wave, text: str, *, fnuz: bool = False) -> Wave:
    """Run one line of assembly."""
    mnemonic, _, operands = text.partition(" ")
    with np.errstate(all="ignore"):
        build(parse(mnemonic, operands, 0, 4, fnuz))(w)
    return w


def vectors(w: Wave, values: Mapping[int, Any]) -> Wave:
    """Set vector registers: 32 bits a lane each, of any dtype."""
    for register, value in values.items():
        w.v[register] = np.ascontiguousarray(np.broadcast_to(value, 64)).view(np.uint32)
    return w


def program(folder: Path, arch: str, source: str, name: str = "k") -> Any:
    """Compile device code, written without any header, and load its kernel."""
    file = folder / f"{name}.hip"
    file.write_text('#define RS_OFFLINE\n#include "gpu.h"\nusing namespace rs;\n' + source)
    out = folder / f"{name}_{arch}.co"
    compile_device(file, arch, out)
    return load_kernels(out, OBJDUMP)[name]


def launch(
    kernel: Any, arrays: Sequence[np.ndarray[Any, Any]], *numbers: int | float, blocks: int = 1, threads: int = 64
) -> None:
    """Run a kernel whose first arguments are arrays and the rest numbers."""
    addresses = [array.ctypes.data for array in arrays]
    buffers = [(array.ctypes.data, array.nbytes, f"array {k}") for k, array in enumerate(arrays)]
    kernel.launch((blocks, 1, 1), (threads, 1, 1), [*addresses, *numbers], buffers)
