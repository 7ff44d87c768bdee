"""Runs one kernel of a code object: disassembly, launch, the waves of each workgroup in turns."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from evals.gfx.emulator import global_memory, lds, matrix, scalar, vector  # noqa: F401  they say what instructions mean
from evals.gfx.emulator.code_object import CodeObject, Value, pack_arguments, user_sgprs
from evals.gfx.emulator.formats import U8, U32
from evals.gfx.emulator.instruction import Step, build, parse, split_operands
from evals.gfx.emulator.memory import EmulatorError, Memory
from evals.gfx.emulator.wave import EXEC, LANE, LANES, Wave, Workgroup

_LINE = re.compile(r"^\s+(\S+)\s*(.*?)\s*//\s*([0-9A-F]+):((?: [0-9A-F]{8})+)")
_MAX_STEPS = 20_000_000  # of one wave: more is a loop that does not end
_TABLE_OF_POSITIONS = ("DST", "SRC0", "SRC1", "SRC2")
_GUARD = b"\0" * 64  # a preload may read past the end of the arguments


class Program:
    """The disassembled text of a code object. Instructions are decoded when they are first reached."""

    def __init__(self, code: CodeObject, path: Path, objdump: str) -> None:
        self.code, self.base, self.fnuz = code, code.base, code.arch == "gfx942"
        text = subprocess.run([objdump, "-d", str(path)], check=True, capture_output=True, text=True).stdout
        self.lines: dict[int, tuple[str, str, int]] = {}
        for line in text.splitlines():
            match = _LINE.match(line)
            if match:
                encoded = match[4].split()
                # A branch's text may be a label; its first word holds the distance.
                operands = str(int(encoded[0], 16) & 0xFFFF) if "branch" in match[1] else match[2]
                self.lines[self.base + int(match[3], 16)] = (match[1], operands, 4 * len(encoded))
        self.steps: dict[int, Step] = {}

    def step(self, w: Wave) -> Step:
        """Return the instruction that the wave is at."""
        if w.index is not None:
            return self._indexed(w)
        step = self.steps.get(w.pc)
        if step is None:
            mnemonic, text, size = self._line(w.pc)
            step = self.steps[w.pc] = build(parse(mnemonic, text, w.pc, size, self.fnuz))
        return step

    def mnemonics(self, start: int, size: int) -> list[str]:
        """List the instructions of one function."""
        return [line[0] for pc, line in self.lines.items() if start <= pc - self.base < start + size]

    def text(self, pc: int) -> str:
        mnemonic, operands, _ = self.lines.get(pc, ("nothing", "", 0))
        return f"{mnemonic} {operands}".strip()

    def _line(self, pc: int) -> tuple[str, str, int]:
        if pc not in self.lines:
            raise EmulatorError(f"no instruction at {pc - self.base:#x}")
        return self.lines[pc]

    def _indexed(self, w: Wave) -> Step:
        """Between s_set_gpr_idx_on and _off vector operands are moved by a number that is known only now."""
        mnemonic, text, size = self._line(w.pc)
        if mnemonic.startswith("v_") and w.index is not None:
            offset, moved = w.index
            pieces = split_operands(text)
            for k, position in enumerate(_TABLE_OF_POSITIONS[: len(pieces)]):
                if position in moved:
                    pieces[k] = re.sub(r"^v(\d+)", lambda match: f"v{int(match[1]) + offset}", pieces[k])
            text = ", ".join(pieces)
        return build(parse(mnemonic, text, w.pc, size, self.fnuz))


def load_kernels(path: Path, objdump: str) -> dict[str, Kernel]:
    """Load every kernel of a code object, by name."""
    program = Program(CodeObject(path.read_bytes()), path, objdump)
    return {name: Kernel(program, name) for name in program.code.kernels}


class Kernel:
    """One kernel of a code object, ready to be launched many times. `instructions` counts those of the last launch."""

    def __init__(self, program: Program, name: str) -> None:
        self.code, self.program, self.name = program.code, program, name
        self.arch = self.code.arch
        self.metadata: Any = self.code.kernels[name]
        self.descriptor = self.code.descriptor(name)
        self.instructions = 0

    def mnemonics(self) -> list[str]:
        """List the kernel's instructions by name."""
        return self.program.mnemonics(*self.code.symbols[self.name])

    def launch(
        self,
        grid: Sequence[int],
        block: Sequence[int],
        arguments: Sequence[Value],
        buffers: Iterable[tuple[int, int, str]],
        dynamic_lds: int = 0,
    ) -> None:
        """Run all workgroups, one after the other.

        `grid` counts workgroups and `block` threads, each in three dimensions. `arguments` are numbers and addresses;
        `buffers` are (address, bytes, name) of all that the kernel may touch.
        Errors: EmulatorError naming kernel, workgroup, wave and instruction.
        """
        memory = Memory()
        memory.add(self.code.base, self.code.size, "the code object", read_only=True)
        for address, size, name in buffers:
            memory.add(address, size, name)
        segment = np.frombuffer(bytearray(pack_arguments(self.metadata, arguments, grid, block) + _GUARD), U8)
        memory.add(segment.ctypes.data, len(segment), "the arguments", read_only=True)
        first = user_sgprs(self.descriptor, segment.ctypes.data)
        expected = (self.descriptor.rsrc2 >> 1) & 31
        if len(first) != expected:
            raise EmulatorError(f"{self.name}: {len(first)} SGPRs are set at the start, the kernel wants {expected}")
        self.instructions = 0
        lds_bytes = self.descriptor.lds + dynamic_lds
        with np.errstate(all="ignore"):
            for z in range(grid[2]):
                for y in range(grid[1]):
                    for x in range(grid[0]):
                        group = Workgroup(memory, lds_bytes)
                        waves = self._waves(group, (x, y, z), block, first)
                        self._run(waves, (x, y, z))

    def _waves(self, group: Workgroup, place: Sequence[int], block: Sequence[int], first: Sequence[int]) -> list[Wave]:
        threads = block[0] * block[1] * block[2]
        entry = self.descriptor.entry + (256 if self.descriptor.preload & 0x7F else 0)
        waves = []
        for start in range(0, threads, LANES):
            w = Wave(group, entry)
            w.s[: len(first)] = first
            at = len(first)
            for bit, number in zip((7, 8, 9), place, strict=True):
                if self.descriptor.rsrc2 >> bit & 1:
                    w.s[at] = number
                    at += 1
            w.set_pair(EXEC, (1 << min(LANES, threads - start)) - 1)
            thread = start + LANE
            x, y, z = thread % block[0], thread // block[0] % block[1], thread // (block[0] * block[1])
            w.v[0] = (x | (y << 10) | (z << 20)).astype(U32)
            waves.append(w)
        return waves

    def _run(self, waves: Sequence[Wave], place: Sequence[int]) -> None:
        """Run every wave to its next barrier, then all again, each round in the other order: a missing one shows."""
        live, forward = list(waves), True
        while live:
            for w in live if forward else reversed(live):
                try:
                    self._to_barrier(w)
                except Exception as error:
                    where = f"workgroup {tuple(place)} wave {waves.index(w)} at {w.pc - self.code.base:#x}"
                    raise EmulatorError(f"{self.name}, {where}, `{self.program.text(w.pc)}`: {error}") from error
            live, forward = [w for w in live if not w.done], not forward

    def _to_barrier(self, w: Wave) -> None:
        steps, program = 0, self.program
        known = program.steps
        while not w.done:
            step = known.get(w.pc) if w.index is None else None
            waits = (step or program.step(w))(w)
            steps += 1
            if waits:
                break
            if steps > _MAX_STEPS:
                raise EmulatorError(f"no end after {steps} instructions")
        self.instructions += steps
