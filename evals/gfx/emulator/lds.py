"""Local data share, and the lane permutations that go through it."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from evals.gfx.emulator.formats import F32, I32, I64, U8, U16, U32, U64, Vector
from evals.gfx.emulator.instruction import Effect, Instruction, means
from evals.gfx.emulator.memory import EmulatorError
from evals.gfx.emulator.wave import LANE, LANES, Wave

_SIZES = {
    **{"b8": 1, "u8": 1, "i8": 1, "b16": 2, "u16": 2, "i16": 2, "b32": 4, "b64": 8, "b96": 12, "b128": 16},
    **{"u8_d16": 1, "u16_d16": 2, "i8_d16": 1, "u8_d16_hi": 1, "u16_d16_hi": 2, "b16_d16_hi": 2, "b8_d16_hi": 1},
}


def lds_index(w: Wave, addresses: Vector, size: int, where: Vector) -> Vector:
    """Return the bytes that the active lanes touch: [lanes, size]. Errors: EmulatorError past the end."""
    chosen = addresses[where].astype(I64)
    if len(chosen) and int(chosen.max()) + size > len(w.workgroup.lds):
        raise EmulatorError(f"LDS access {chosen.min()}..{chosen.max() + size} past {len(w.workgroup.lds)}")
    return chosen[:, None] + np.arange(size)


def words(w: Wave, register: int, size: int, where: Vector) -> Vector:
    """Take `size` bytes a lane out of registers: uint8 [lanes, size]."""
    count = -(-size // 4)
    block = np.ascontiguousarray(w.v[register : register + count, where].T)
    return block.view(U8).reshape(-1, 4 * count)[:, :size]


def put_bytes(w: Wave, register: int, data: Vector, where: Vector, *, sign: bool = False, half: str = "") -> None:
    """Put uint8 [lanes, size] into registers; less than a word is extended, or goes to one half ("lo", "hi")."""
    size = data.shape[1]
    if size >= 4:
        rows = np.ascontiguousarray(data).view(U32).reshape(len(data), -1).T
        w.v[register : register + size // 4, where] = rows
        return
    wide = np.zeros((len(data), 4), U8)
    wide[:, :size] = data
    x = wide.view(U32).reshape(-1)
    if sign:
        top = 1 << (8 * size - 1)
        x = (((x.astype(I64) ^ top) - top) & 0xFFFFFFFF).astype(U32)
    old = w.v[register, where]
    if half == "lo":
        x = (old & U32(0xFFFF0000)) | (x & U32(0xFFFF))
    elif half == "hi":
        x = (old & U32(0xFFFF)) | (x << U32(16))
    w.v[register, where] = x


def half_of(name: str) -> str:
    """Return which half of a register a d16 access names."""
    return "hi" if name.endswith("d16_hi") else "lo" if name.endswith("d16") else ""


@means("ds_bpermute_b32", "ds_permute_b32")
def _permute(i: Instruction) -> Effect:
    destination, address, data = i.operands
    offset, pull = i.number("offset"), i.name == "ds_bpermute_b32"

    def effect(w: Wave) -> None:
        active = w.active()
        lane = ((address.vector(w) + U32(offset)) >> U32(2)) & U32(LANES - 1)
        values = data.vector(w)
        if pull:
            result = np.where(active[lane], values[lane], U32(0))
        else:
            result = np.zeros(LANES, U32)
            result[lane[active]] = values[active]
        w.write(destination.i, result, active)

    return effect


def _swizzle_source(text: str) -> Vector:
    named = re.fullmatch(r"swizzle\((\w+),(.*)\)", text)
    if named is None:
        code = int(text, 0)
        if code & 0x8000:
            return np.asarray(LANE // 4 * 4 + np.array([(code >> (2 * q)) & 3 for q in range(4)])[LANE % 4])
        kept, set_, flipped = code & 31, (code >> 5) & 31, (code >> 10) & 31
        return LANE // 32 * 32 + ((((LANE % 32) & kept) | set_) ^ flipped)
    numbers = [int(q) for q in re.findall(r"\d+", named[2])]
    if named[1] == "QUAD_PERM":
        return np.asarray(LANE // 4 * 4 + np.array(numbers)[LANE % 4])
    if named[1] == "SWAP":
        return LANE ^ numbers[0]
    if named[1] == "REVERSE":
        return LANE // numbers[0] * numbers[0] + numbers[0] - 1 - LANE % numbers[0]
    if named[1] == "BROADCAST":
        return LANE // numbers[0] * numbers[0] + numbers[1]
    raise EmulatorError(f"a swizzle that is not known: {text}")


@means("ds_swizzle_b32")
def _swizzle(i: Instruction) -> Effect:
    source = _swizzle_source(i.modifiers["offset"])
    destination, data = i.operands[:2]

    def effect(w: Wave) -> None:
        active = w.active()
        w.write(destination.i, np.where(active[source], data.vector(w)[source], U32(0)), active)

    return effect


@means(*(f"ds_{k}2{st}_b{bits}" for k in ("read", "write") for st in ("", "st64") for bits in (32, 64)))
def _two(i: Instruction) -> Effect:
    size = 4 if i.name.endswith("b32") else 8
    unit = size * (64 if "st64" in i.name else 1)
    offsets = [i.number("offset0") * unit, i.number("offset1") * unit]

    def read(w: Wave) -> None:
        active, address = w.active(), i.operands[1].vector(w)
        loaded = [w.workgroup.lds[lds_index(w, address + U32(offset), size, active)] for offset in offsets]
        for k in (0, 1):
            put_bytes(w, i.operands[0].i + k * size // 4, loaded[k], active)

    def write(w: Wave) -> None:
        active, address = w.active(), i.operands[0].vector(w)
        for k in (0, 1):
            at = lds_index(w, address + U32(offsets[k]), size, active)
            w.workgroup.lds[at] = words(w, i.operands[k + 1].i, size, active)

    return read if "read2" in i.name else write


@means(*(f"ds_read_{size}" for size in _SIZES))
def _read(i: Instruction) -> Effect:
    kind = i.name.removeprefix("ds_read_")
    size, half, sign, offset = _SIZES[kind], half_of(kind), kind[0] == "i", i.number("offset")
    destination, address = i.operands[:2]

    def effect(w: Wave) -> None:
        active = w.active()
        loaded = w.workgroup.lds[lds_index(w, address.vector(w) + U32(offset), size, active)]
        put_bytes(w, destination.i, loaded, active, sign=sign, half=half)

    return effect


@means(*(f"ds_write_{size}" for size in _SIZES))
def _write(i: Instruction) -> Effect:
    kind = i.name.removeprefix("ds_write_")
    size, upper, offset = _SIZES[kind], kind.endswith("d16_hi"), i.number("offset")
    address, data = i.operands[:2]

    def effect(w: Wave) -> None:
        active = w.active()
        stored = words(w, data.i, 4 if upper else size, active)
        stored = stored[:, 2 : 2 + size] if upper else stored
        w.workgroup.lds[lds_index(w, address.vector(w) + U32(offset), size, active)] = stored

    return effect


@means("ds_read_b64_tr_b16", "ds_read_b64_tr_b8")
def _read_transposed(i: Instruction) -> Effect:
    # gfx950: within 16 lanes, lane n receives column n of the 64 bits that each of them addresses.
    size, offset = (2 if i.name.endswith("16") else 1), i.number("offset")
    destination, address = i.operands[:2]

    def effect(w: Wave) -> None:
        active = w.active()
        loaded = np.zeros((LANES, 8), U8)
        loaded[active] = w.workgroup.lds[lds_index(w, address.vector(w) + U32(offset), 8, active)]
        if size == 2:  # 16 lanes of 4 halves are 4 rows of 16 columns
            block: Vector = loaded.view(U16).reshape(4, 4, 16)
        else:  # 16 lanes of 8 bytes are 8 rows of 16 columns
            block = loaded.reshape(4, 8, 16)
        columns = np.ascontiguousarray(block.transpose(0, 2, 1)).view(U8).reshape(LANES, 8)
        put_bytes(w, destination.i, columns[active], active)

    return effect


# One lane after the other: two lanes may name the same word.
_ATOMICS: dict[str, tuple[type, Callable[[Vector, Vector], Vector]]] = {
    "add_u32": (U32, lambda old, new: old + new),
    "add_f32": (F32, lambda old, new: old + new),
    "add_u64": (U64, lambda old, new: old + new),
    "sub_u32": (U32, lambda old, new: old - new),
    "max_u32": (U32, np.maximum),
    "min_u32": (U32, np.minimum),
    "max_i32": (I32, np.maximum),
    "min_i32": (I32, np.minimum),
    "max_f32": (F32, np.fmax),
    "min_f32": (F32, np.fmin),
    "or_b32": (U32, lambda old, new: old | new),
    "and_b32": (U32, lambda old, new: old & new),
    "xor_b32": (U32, lambda old, new: old ^ new),
}


def _returning(name: str) -> str:
    operation, type_ = name.rsplit("_", 1)
    return f"{operation}_rtn_{type_}"


@means(*(f"ds_{name}" for name in _ATOMICS), *(f"ds_{_returning(name)}" for name in _ATOMICS))
def _atomic(i: Instruction) -> Effect:
    returns = "_rtn_" in i.name
    dtype, function = _ATOMICS[i.name.removeprefix("ds_").replace("_rtn", "")]
    size, offset = np.dtype(dtype).itemsize, i.number("offset")
    address, data = i.operands[1 if returns else 0], i.operands[2 if returns else 1]

    def effect(w: Wave) -> None:
        active = w.active()
        at = lds_index(w, address.vector(w) + U32(offset), size, active)
        new: Vector = np.ascontiguousarray(words(w, data.i, size, active)).view(dtype).reshape(-1)
        old = np.empty_like(new)
        for lane, where in enumerate(at):
            held: Vector = w.workgroup.lds[where[0] : where[0] + size].view(dtype)
            old[lane] = held[0]
            held[0] = function(held[0], new[lane])
        if returns:
            put_bytes(w, i.operands[0].i, old.view(U8).reshape(len(old), size), active)

    return effect
