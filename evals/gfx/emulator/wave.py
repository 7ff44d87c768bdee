"""Registers of one wave, and the operands that instructions name."""

from __future__ import annotations

import re

import numpy as np

from evals.gfx.emulator.formats import F32, F64, U8, U32, U64, Vector
from evals.gfx.emulator.memory import EmulatorError, Memory

LANES = 64
LANE = np.arange(LANES)
ALL = (1 << LANES) - 1
WORD = 0xFFFFFFFF
VCC, M0, EXEC = 106, 124, 126
ACCUMULATORS = 256  # a0 is row 256 of the vector registers
_NAMED = {"vcc": 106, "vcc_lo": 106, "vcc_hi": 107, "m0": 124, "exec": 126, "exec_lo": 126, "exec_hi": 127}
_CONSTANTS = {
    "0.5": 0.5,
    "-0.5": -0.5,
    "1.0": 1.0,
    "-1.0": -1.0,
    "2.0": 2.0,
    "-2.0": -2.0,
    "4.0": 4.0,
    "-4.0": -4.0,
    "0.15915494": 0.15915494309189532,
    "0.15915494309189532": 0.15915494309189532,
}
_REGISTER = re.compile(r"([vsa])(?:(\d+)|\[(\d+)(?::(\d+))?\])")
_INTEGER = re.compile(r"-?(0x[0-9a-f]+|\d+)")


class Workgroup:
    """What the waves of a workgroup share. LDS begins as NaN in every format: a read before a write shows."""

    def __init__(self, memory: Memory, lds_bytes: int) -> None:
        self.memory = memory
        self.lds = np.full(max(-(-lds_bytes // 16) * 16, 16), 0xFF, U8)


class Wave:
    """64 lanes. `v` has a row for each vector register, then one for each accumulator."""

    __slots__ = ("_exec", "_exec_lanes", "done", "index", "pc", "s", "scc", "v", "workgroup")

    def __init__(self, workgroup: Workgroup, pc: int) -> None:
        self.v = np.zeros((512, LANES), U32)
        self.s = [0] * 128
        self.scc = 0
        self.pc = pc
        self.workgroup = workgroup
        self.done = False
        self.index: tuple[int, frozenset[str]] | None = None  # s_set_gpr_idx_on: offset, operands that it moves
        self._exec = -1
        self._exec_lanes = np.zeros(LANES, bool)

    def pair(self, i: int) -> int:
        """Read two SGPRs as 64 bits."""
        return self.s[i] | (self.s[i + 1] << 32)

    def set_pair(self, i: int, value: int) -> None:
        """Write 64 bits to two SGPRs."""
        self.s[i], self.s[i + 1] = value & WORD, (value >> 32) & WORD

    def active(self) -> Vector:
        """Return the lanes that are on, as bools."""
        value = self.pair(EXEC)
        if value != self._exec:
            self._exec, self._exec_lanes = value, lanes_of(value)
        return self._exec_lanes

    def write(self, i: int, value: Vector, where: Vector) -> None:
        """Write 32 bits a lane to vector register `i`."""
        np.copyto(self.v[i], value.view(U32) if value.dtype == F32 else value.astype(U32, copy=False), where=where)

    def write64(self, i: int, value: Vector, where: Vector) -> None:
        """Write 64 bits a lane to vector registers `i` and `i + 1`."""
        bits = value.view(U64)
        self.write(i, (bits & U64(WORD)).astype(U32), where)
        self.write(i + 1, (bits >> U64(32)).astype(U32), where)


def lanes_of(mask: int) -> Vector:
    """Unpack 64 bits into bools."""
    return np.unpackbits(np.frombuffer(mask.to_bytes(8, "little"), U8), bitorder="little").astype(bool)


def mask_of(lanes: Vector) -> int:
    """Pack bools into 64 bits."""
    return int.from_bytes(np.packbits(lanes, bitorder="little").tobytes(), "little")


class Operand:
    """One operand as the disassembler writes it."""

    __slots__ = ("absolute", "count", "float_", "i", "kind", "negative", "text", "value")

    def __init__(self, text: str) -> None:
        self.text = text
        self.float_: float | None = None
        self.value, self.i, self.count = 0, 0, 1
        bare, self.negative, self.absolute = _without_signs(text)
        register = _REGISTER.fullmatch(bare)
        if register:
            self.kind = "s" if register[1] == "s" else "v"
            first = int(register[2] or register[3])
            self.count = int(register[4] or first) - first + 1
            self.i = first + (ACCUMULATORS if register[1] == "a" else 0)
        elif bare in _NAMED:
            self.kind, self.i, self.count = "s", _NAMED[bare], 2 if bare in ("vcc", "exec") else 1
        elif bare.startswith("ttmp"):
            self.kind, self.i = "s", 108 + int(bare.removeprefix("ttmp"))
        elif bare in ("off", "null"):
            self.kind = bare
        elif bare in ("scc", "src_scc"):
            self.kind = "scc"
        elif bare in _CONSTANTS:
            self.kind, self.float_ = "constant", _CONSTANTS[bare]
            self.value = int(np.array(self.float_, F32).view(U32))
        elif _INTEGER.fullmatch(bare):
            self.kind, self.value = "constant", int(bare, 0)
        else:
            self.kind = "other"

    def scalar(self, w: Wave) -> int:
        """Read 32 bits."""
        if self.kind == "s":
            return w.s[self.i]
        if self.kind == "constant":
            return self.value & WORD
        if self.kind == "scc":
            return w.scc
        raise EmulatorError(f"no scalar: {self.text}")

    def scalar64(self, w: Wave) -> int:
        """Read 64 bits."""
        if self.kind == "s":
            return w.pair(self.i) if self.count > 1 or self.i in (VCC, EXEC) else w.s[self.i]
        if self.kind == "constant":
            return int(np.array(self.float_, F64).view(U64)) if self.float_ is not None else self.value & ALL
        raise EmulatorError(f"no 64-bit scalar: {self.text}")

    def vector(self, w: Wave, word: int = 0) -> Vector:
        """Read 32 bits a lane; `word` counts registers from the first."""
        if self.kind == "v":
            return np.asarray(w.v[self.i + word])
        if self.kind == "s":
            return np.full(LANES, w.s[self.i + word], U32)
        return np.full(LANES, self.scalar(w), U32)

    def vector64(self, w: Wave) -> Vector:
        """Read 64 bits a lane."""
        if self.kind == "v":
            return np.asarray(w.v[self.i].astype(U64) | (w.v[self.i + 1].astype(U64) << U64(32)))
        return np.full(LANES, self.scalar64(w), U64)


def _without_signs(text: str) -> tuple[str, bool, bool]:
    """Strip negation and absolute value: (operand, negated, absolute)."""
    negative = absolute = False
    if re.match(r"-[vsa|m]", text):
        negative, text = True, text[1:]
    if text.startswith("neg("):
        negative, text = True, text[4:-1]
    if text.startswith("|"):
        absolute, text = True, text.strip("|")
    if text.startswith("abs("):
        absolute, text = True, text[4:-1]
    return text, negative, absolute
