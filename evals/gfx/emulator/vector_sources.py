"""How a vector instruction reads its sources and writes its result: signs, halves, lanes, output modifiers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from evals.gfx.emulator.formats import F16, F32, F64, I16, I32, U16, U32, Vector, low_half
from evals.gfx.emulator.instruction import Instruction
from evals.gfx.emulator.memory import EmulatorError
from evals.gfx.emulator.wave import LANE, LANES, Wave

Read = Callable[[Wave], Vector]
_VIEWS = {"f": F32, "i": I32, "d": F64}


@dataclass(frozen=True)
class LaneMap:
    """DPP: where each lane reads, whether that lane exists, and which lanes write."""

    source: Vector
    exists: Vector
    writes: Vector
    zero_outside: bool  # bound_ctrl: a lane without a source reads 0, else it keeps its old value


def lane_map(modifiers: Mapping[str, str]) -> LaneMap:
    """Read the DPP modifiers."""
    row, at = LANE // 16 * 16, LANE % 16
    exists = np.ones(LANES, bool)
    number = {key: int(text) for key, text in modifiers.items() if key.startswith(("row_", "wave_")) and text.isdigit()}
    if "quad_perm" in modifiers:
        source = LANE // 4 * 4 + np.array([int(q) for q in modifiers["quad_perm"].strip("[]").split(",")])[LANE % 4]
    elif "row_shl" in number:
        source, exists = LANE + number["row_shl"], at + number["row_shl"] < 16
    elif "row_shr" in number:
        source, exists = LANE - number["row_shr"], at >= number["row_shr"]
    elif "row_ror" in number:
        source = row + (at - number["row_ror"]) % 16
    elif "row_newbcast" in number:
        source = row + number["row_newbcast"]
    elif number.get("row_bcast") == 15:
        source, exists = row - 1, LANE >= 16
    elif number.get("row_bcast") == 31:
        source, exists = np.full(LANES, 31), LANE >= 32
    elif "wave_shr" in number:
        source, exists = LANE - 1, LANE > 0
    else:
        source = _mirrored(modifiers)
    rows, banks = (int(modifiers.get(key, "0xf"), 0) for key in ("row_mask", "bank_mask"))
    writes = (((rows >> (LANE // 16)) & 1) & ((banks >> (at // 4)) & 1)).astype(bool)
    return LaneMap(np.clip(source, 0, LANES - 1), exists, writes, "bound_ctrl" in modifiers)


def _mirrored(modifiers: Mapping[str, str]) -> Vector:
    if "row_mirror" in modifiers:
        return LANE // 16 * 16 + 15 - LANE % 16
    if "row_half_mirror" in modifiers:
        return LANE // 8 * 8 + 7 - LANE % 8
    raise EmulatorError(f"a DPP pattern that is not known: {dict(modifiers)}")


def _selected(bits: Vector, select: str) -> Vector:
    """SDWA: one byte or half of a word."""
    at = int(select[-1])
    if select.startswith("BYTE"):
        return (bits >> U32(8 * at)) & U32(255)
    return (bits >> U32(16 * at)) & U32(0xFFFF)


class Sources:
    """Sources and destination of one instruction. Sources are counted from 0; `first` is the first's operand."""

    def __init__(self, i: Instruction, first: int = 1) -> None:
        self.instruction, self.first = i, first
        self.lanes = lane_map(i.modifiers) if i.encoding == "dpp" else None
        self.clamp = "clamp" in i.modifiers
        self.op_sel = i.numbers("op_sel", 0)
        self.multiply = {"2": 2.0, "4": 4.0}.get(i.modifiers.get("mul", ""), 1.0)
        if i.modifiers.get("div") == "2":
            self.multiply = 0.5

    def read(self, k: int, kind: str) -> Read:
        """Return what reads source `k` as numbers of `kind`."""
        i = self.instruction
        operand = i.operands[k + self.first]
        select = i.modifiers.get(f"src{k}_sel", "DWORD")
        lanes = self.lanes if k == 0 else None
        upper = "op_sel" in i.modifiers and k < len(self.op_sel) and bool(self.op_sel[k])
        as_half = operand.kind == "constant" and operand.float_ is not None and kind == "h"
        half_constant = np.array(operand.float_ if as_half else 0, F16).view(U16)

        def get(w: Wave) -> Vector:
            x = operand.vector64(w) if kind in "qd" else operand.vector(w)
            if lanes is not None:
                x = np.where(lanes.exists, x[lanes.source], U32(0))
            if select != "DWORD":
                x = _selected(x, select)
            if kind in "whs":
                if as_half:
                    x = np.full(LANES, half_constant, U32)
                elif upper:
                    x = x >> U32(16)
                x = low_half(x)
                x = x.view(F16) if kind == "h" else x.view(I16) if kind == "s" else x
            elif kind in _VIEWS:
                x = x.view(_VIEWS[kind])
            if kind in "fhd":
                x = np.abs(x) if operand.absolute else x
                x = -x if operand.negative else x
            return x

        return get

    @cached_property
    def _destination_field(self) -> tuple[int, int, bool] | None:
        """SDWA: (shift, mask, whether the rest is kept), or None for a whole word."""
        select = self.instruction.modifiers.get("dst_sel", "DWORD")
        if select == "DWORD":
            return None
        byte = select.startswith("BYTE")
        keep = self.instruction.modifiers.get("dst_unused") == "UNUSED_PRESERVE"
        return int(select[-1]) * (8 if byte else 16), 0xFF if byte else 0xFFFF, keep

    def write(self, w: Wave, kind: str, x: Vector, where: Vector) -> None:
        """Write a result of `kind` to the destination."""
        destination = self.instruction.operands[0].i
        if kind in "fh":
            x = x * x.dtype.type(self.multiply) if self.multiply != 1 else x
            x = np.clip(x, 0, 1) if self.clamp else x
        if kind in "qd":
            w.write64(destination, np.ascontiguousarray(x), where)
            return
        if kind in "fi":
            x = x.view(U32)
        elif kind in "whs":
            x = x.view(U16).astype(U32)
            if "op_sel" in self.instruction.modifiers and self.op_sel[-1]:
                x = (w.v[destination] & U32(0xFFFF)) | (x << U32(16))
        field = self._destination_field
        if field is not None:
            shift, mask, keep = field
            x = (x & U32(mask)) << U32(shift)
            if keep:
                x = x | (w.v[destination] & U32(~(mask << shift) & 0xFFFFFFFF))
        np.copyto(w.v[destination], x.astype(U32, copy=False), where=where)

    def writing(self, w: Wave) -> Vector:
        """Return the lanes that the instruction writes."""
        active = w.active()
        if self.lanes is not None:
            active = active & self.lanes.writes
            if not self.lanes.zero_outside:
                active = active & self.lanes.exists
        return active
