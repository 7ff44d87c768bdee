"""Matrix cores: v_mfma of 16 x 16 and 32 x 32, all types but fp6 and xf32, with and without block scales."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from evals.gfx.emulator.formats import F16, F32, F64, FP4, I8, I32, I64, U8, U16, U32, Vector, fp8_values, from_bf16
from evals.gfx.emulator.instruction import Effect, Instruction, means
from evals.gfx.emulator.memory import EmulatorError
from evals.gfx.emulator.wave import LANE, LANES, Operand, Wave

_NAME = re.compile(r"v_mfma_(scale_)?(f32|i32)_(\d+)x(\d+)x(\d+)_?(\w+)")
_F8F6F4 = {0: "fp8", 1: "bf8", 4: "fp4"}
_PER_WORD = {"bf16": 2, "f16": 2, "fp8": 4, "bf8": 4, "i8": 4, "fp4": 8, "f32": 1}
_SIZES = ("16x16x4", "16x16x16", "16x16x32", "16x16x64", "16x16x128", "32x32x2", "32x32x4", "32x32x8", "32x32x16")
_TYPES = (
    *("f32", "f16", "bf16", "bf16_1k", "f8f6f4", "fp8_fp8", "fp8_bf8", "bf8_fp8", "bf8_bf8"),
    *("_f32", "_f16", "_bf16", "_bf16_1k", "_f8f6f4", "_fp8_fp8", "_fp8_bf8", "_bf8_fp8", "_bf8_bf8"),
)
_EVERY = (
    *(f"v_mfma_{s}f32_{n}{t}" for s in ("", "scale_") for n in (*_SIZES, "32x32x32", "32x32x64") for t in _TYPES),
    *(f"v_mfma_i32_{n}{t}" for n in (*_SIZES, "32x32x32", "32x32x64") for t in ("i8", "_i8")),
)


@dataclass(frozen=True, slots=True)
class Shape:
    """An m x n x k product on 64 lanes: lane l holds row l % m and the k-chunk l // m of `per_lane` elements."""

    m: int
    n: int
    k: int

    @property
    def groups(self) -> int:
        return LANES // self.m

    @property
    def per_lane(self) -> int:
        return self.k // self.groups

    @property
    def registers(self) -> int:
        return self.m * self.n // LANES

    def places(self) -> tuple[Vector, Vector]:
        """Return row and column of the result that each register of each lane holds: [registers, lanes]."""
        group = LANE // self.m
        register = np.arange(self.registers)[:, None]
        if self.m == 32:
            rows = 8 * (register // 4) + 4 * group + register % 4
        else:
            rows = 4 * group + register
        return rows, np.broadcast_to(LANE % self.m, rows.shape)


def _formats(i: Instruction, type_: str) -> tuple[str, str]:
    if type_ == "f8f6f4":
        try:
            return _F8F6F4[i.number("cbsz")], _F8F6F4[i.number("blgp")]
        except KeyError:
            raise i.unknown("with fp6 operands") from None
    if "8_" in type_:
        first, second = type_.split("_")
        return first, second
    same = type_.removesuffix("_1k")
    return same, same


def _reader(shape: Shape, operand: Operand, kind: str, fnuz: bool) -> Callable[[Wave], Vector]:
    """Return what reads a matrix operand: [rows, groups, elements of a lane]."""
    count = max(shape.per_lane // _PER_WORD[kind], 1)

    def read(w: Wave) -> Vector:
        block = np.ascontiguousarray(w.v[operand.i : operand.i + count].T)
        if kind == "bf16":
            x = from_bf16(block.view(U16).astype(U32))
        elif kind == "f16":
            x = block.view(F16).astype(F32)
        elif kind in ("fp8", "bf8"):
            x = fp8_values("fp8" if kind == "fp8" else "bf8", fnuz)[block.view(U8)]
        elif kind == "i8":
            x = block.view(I8).astype(F64)
        elif kind == "fp4":
            pairs = block.view(U8)
            x = FP4[np.stack([pairs & 15, pairs >> 4], 2).reshape(LANES, -1)]
        else:
            x = block.view(F32)
        matrix = np.zeros((shape.m, shape.groups, shape.per_lane), x.dtype)
        matrix[LANE % shape.m, LANE // shape.m] = x.reshape(LANES, shape.per_lane)
        return matrix

    return read


def _scaler(i: Instruction, shape: Shape, which: int, kind: str) -> Callable[[Wave, Vector], Vector]:
    """Return what multiplies by 2^(e - 127), one exponent for each 32 elements of k."""
    operand = i.operands[4 + which]
    byte = i.numbers("op_sel", 0, 3)[which] | (i.numbers("op_sel_hi", 0, 3)[which] << 1)
    group, element = np.arange(shape.groups)[:, None], np.arange(shape.per_lane)
    if kind == "fp4":  # 32 consecutive elements of k in a lane
        k = group * shape.per_lane + element
    else:  # two chunks of 16
        k = (element // 16) * (16 * shape.groups) + 16 * group + element % 16

    def scale(w: Wave, matrix: Vector) -> Vector:
        exponent = (operand.vector(w) >> U32(8 * byte)) & U32(255)
        factors = np.zeros((shape.m, shape.groups))
        factors[LANE % shape.m, LANE // shape.m] = np.exp2(exponent.astype(F64) - 127)
        return matrix * factors[:, k // 32].astype(F32)

    return scale


@means(*_EVERY)
def _multiply(i: Instruction) -> Effect:
    match = _NAME.fullmatch(i.name)
    if match is None:
        raise i.unknown()
    shape = Shape(*(int(match[k]) for k in (3, 4, 5)))
    kinds = _formats(i, match[6])
    read_a, read_b = (_reader(shape, i.operands[1 + k], kinds[k], i.fnuz) for k in (0, 1))
    scales = [_scaler(i, shape, k, kinds[k]) for k in (0, 1)] if match[1] else []
    rows, columns = shape.places()
    destination, addend = i.operands[0].i, i.operands[3]
    if match[2] == "i32" and kinds[0] != "i8":
        raise EmulatorError(f"{i.name} with {kinds[0]}")

    def effect(w: Wave) -> None:
        a, b = read_a(w), read_b(w)
        if scales:
            a, b = scales[0](w, a), scales[1](w, b)
        product = a.reshape(shape.m, -1).astype(F64) @ b.reshape(shape.n, -1).astype(F64).T
        cells = product[rows, columns]
        if match[2] == "f32":
            start: Vector = np.full(cells.shape, addend.float_ or 0.0, F32)
            if addend.kind != "constant":
                start = w.v[addend.i : addend.i + shape.registers].view(F32)
            result = (cells + start).astype(F32).view(U32)
        else:
            start = np.full(cells.shape, addend.value, I64)
            if addend.kind != "constant":
                start = w.v[addend.i : addend.i + shape.registers].view(I32).astype(I64)
            result = (cells.astype(I64) + start).astype(I32).view(U32)
        w.v[destination : destination + shape.registers] = result

    return effect
