"""A GPU of one architecture that is not there: takes launches of Triton and of the HIP entry points, keeps what was
compiled for each, and has the emulator execute it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from evals.gfx.emulator.code_object import Value
from evals.gfx.emulator.machine import Kernel, load_kernels
from evals.gfx.registry import Arch
from evals.gfx.toolchain import OBJDUMP

Buffer = tuple[int, int, str]  # address, bytes, name


@dataclass(frozen=True, slots=True)
class Resources:
    """What a kernel needs, and the instructions that it is made of, counted by what a check asks."""

    vgprs: int
    agprs: int
    sgprs: int
    lds: int  # bytes
    scratch: int  # bytes a lane
    spills: int
    loads: dict[int, int]  # global loads by bytes a lane
    stores: dict[int, int]
    matrix: tuple[str, ...]  # names of matrix instructions


@dataclass(slots=True)
class Device:
    """`execute` False: launches are compiled and kept, not run. `folder` holds code objects."""

    arch: Arch
    folder: Path
    execute: bool = True
    launched: dict[str, list[Resources]] = field(default_factory=dict)  # by the kernel's name, each build once
    instructions: int = 0  # of waves, executed
    library: Any = None  # the HIP entry points, once hip_device.py has made them
    _loaded: dict[Path, dict[str, Kernel]] = field(default_factory=dict)

    def kernels(self, path: Path) -> dict[str, Kernel]:
        """Load the kernels of a code object, by name; once for each file."""
        if path not in self._loaded:
            self._loaded[path] = load_kernels(path, OBJDUMP)
        return self._loaded[path]

    def launch(
        self,
        kernel: Kernel,
        grid: Sequence[int],
        block: Sequence[int],
        arguments: Sequence[Value],
        buffers: Iterable[Buffer],
        dynamic_lds: int = 0,
    ) -> None:
        """Note a launch and, unless only compiling, run it."""
        builds = self.launched.setdefault(kernel.name, [])
        needs = resources(kernel, dynamic_lds)
        if needs not in builds:
            builds.append(needs)
        if self.execute:
            kernel.launch(grid, block, arguments, buffers, dynamic_lds)
            self.instructions += kernel.instructions


_BYTES = {
    **{"dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16, "ubyte": 1, "sbyte": 1, "byte": 1},
    **{"ushort": 2, "sshort": 2, "short": 2},
}


def _width(mnemonic: str, what: str) -> int | None:
    """Return the bytes a lane of a global load or store, or None for another instruction."""
    for space in ("global", "buffer", "flat"):
        start = f"{space}_{what}_"
        if mnemonic.startswith(start):
            size = mnemonic.removeprefix(start).removeprefix("lds_").split("_")[0]
            return _BYTES.get(size)
    return None


def _counted(mnemonics: Sequence[str], what: str) -> dict[int, int]:
    counts: dict[int, int] = {}
    for mnemonic in mnemonics:
        width = _width(mnemonic, what)
        if width is not None:
            counts[width] = counts.get(width, 0) + 1
    return dict(sorted(counts.items()))


def resources(kernel: Kernel, dynamic_lds: int) -> Resources:
    """Read a kernel's metadata and its instructions."""
    metadata, mnemonics = kernel.metadata, kernel.mnemonics()
    return Resources(
        vgprs=metadata[".vgpr_count"],
        agprs=metadata.get(".agpr_count", 0),
        sgprs=metadata[".sgpr_count"],
        lds=metadata[".group_segment_fixed_size"] + dynamic_lds,
        scratch=metadata[".private_segment_fixed_size"],
        spills=metadata.get(".vgpr_spill_count", 0) + metadata.get(".sgpr_spill_count", 0),
        loads=_counted(mnemonics, "load"),
        stores=_counted(mnemonics, "store"),
        matrix=tuple(sorted({m for m in mnemonics if m.startswith(("v_mfma", "v_smfmac"))})),
    )


def span(x: torch.Tensor, name: str = "") -> Buffer:
    """Return the bytes that a tensor reaches: from its first element to its last, whatever lies between."""
    if x.numel() == 0:
        return x.data_ptr(), 0, name
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    shape = f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"
    return x.data_ptr(), (last + 1) * x.element_size(), f"{name} {shape}".strip()
