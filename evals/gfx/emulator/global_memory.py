"""Loads, stores and atomics of global memory: flat and raw buffer addresses, and loads that go straight to LDS."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from evals.gfx.emulator.formats import F16, F32, F64, I32, I64, U8, U16, U32, U64, Vector, from_bf16, to_bf16
from evals.gfx.emulator.instruction import Effect, Instruction, means
from evals.gfx.emulator.lds import half_of, put_bytes, words
from evals.gfx.emulator.memory import EmulatorError
from evals.gfx.emulator.wave import ALL, LANE, LANES, M0, Operand, Wave

_SIZES = {
    **{"dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16, "ubyte": 1, "sbyte": 1, "ushort": 2, "sshort": 2},
    **{"short_d16": 2, "short_d16_hi": 2, "ubyte_d16": 1, "ubyte_d16_hi": 1, "sbyte_d16": 1, "sbyte_d16_hi": 1},
}
_STORES = {
    **{"dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16, "byte": 1, "short": 2},
    **{"short_d16_hi": 2, "byte_d16_hi": 1},
}
_SPACES = ("global", "flat", "buffer")
Address = Callable[[Wave], tuple[Vector, Vector]]  # addresses of all lanes, lanes that access


def _flat(i: Instruction, vector: Operand, scalar: Operand | None) -> Address:
    offset = i.number("offset")

    def address(w: Wave) -> tuple[Vector, Vector]:
        if scalar is not None and scalar.kind == "s":
            base = U64((scalar.scalar64(w) + offset) & ALL)
            return vector.vector(w).astype(U64) + base, w.active()
        return vector.vector64(w) + U64(offset & ALL), w.active()

    return address


def _buffer(i: Instruction, vector: Operand, resource: Operand, scalar: Operand, size: int) -> Address:
    """Raw buffers: an access past the number of records is dropped, a load gives 0."""
    if "idxen" in i.modifiers:
        raise i.unknown("(structured buffer)")
    offset, by_lane = i.number("offset"), "offen" in i.modifiers

    def address(w: Wave) -> tuple[Vector, Vector]:
        first, second, records = w.s[resource.i], w.s[resource.i + 1], w.s[resource.i + 2]
        if second >> 31:
            raise EmulatorError("a swizzled buffer")
        base = first | ((second & 0xFFFF) << 32)
        lane = vector.vector(w).astype(I64) if by_lane else np.zeros(LANES, I64)
        inside = (lane + offset + size <= records) & w.active()
        return U64(base) + U64(scalar.scalar(w)) + (lane + offset).astype(U64), inside

    return address


def _address(i: Instruction, first: int, size: int) -> Address:
    """Return the addresses that the operands from `first` on name."""
    operands = i.operands[first:]
    if i.name.startswith("buffer"):
        return _buffer(i, operands[0], operands[1], operands[2], size)
    return _flat(i, operands[0], operands[1] if len(operands) > 1 else None)


def _to_lds(i: Instruction, size: int) -> Effect:
    # The address is the same for all lanes, in m0; lane n's word follows lane n - 1's.
    address, offset = _address(i, 0, size), i.number("offset")
    stride = max(size, 4)

    def effect(w: Wave) -> None:
        addresses, inside = address(w)
        active = w.active()
        data = np.zeros((LANES, stride), U8)
        data[inside, :size] = w.workgroup.memory.gather(addresses[inside], size)
        at = (w.s[M0] & 0x3FFFF) + offset + LANE * stride
        if int(at[active].max(initial=0)) + stride > len(w.workgroup.lds):
            raise EmulatorError("a load to LDS past its end")
        w.workgroup.lds[at[active][:, None] + np.arange(stride)] = data[active]

    return effect


@means(
    *(f"{space}_load_{size}" for space in _SPACES for size in _SIZES),
    *(f"{space}_load_lds_{size}" for space in _SPACES for size in _SIZES),
)
def _load(i: Instruction) -> Effect:
    kind = i.name.split("_load_", 1)[1]
    straight = kind.startswith("lds_") or "lds" in i.modifiers
    kind = kind.removeprefix("lds_")
    size = _SIZES[kind]
    if straight:
        return _to_lds(i, size)
    address, destination = _address(i, 1, size), i.operands[0].i
    sign, half = kind.startswith(("sbyte", "sshort")), half_of(kind)

    def effect(w: Wave) -> None:
        addresses, inside = address(w)
        active = w.active()
        data = np.zeros((LANES, size), U8)
        data[inside] = w.workgroup.memory.gather(addresses[inside], size)
        put_bytes(w, destination, data[active], active, sign=sign, half=half)

    return effect


@means(*(f"{space}_store_{size}" for space in _SPACES for size in _STORES))
def _store(i: Instruction) -> Effect:
    kind = i.name.split("_store_", 1)[1]
    size, upper, buffer = _STORES[kind], kind.endswith("d16_hi"), i.name.startswith("buffer")
    if buffer:
        address, register = _address(i, 1, size), i.operands[0].i
    else:
        more = i.operands[2] if len(i.operands) > 2 else None
        address, register = _flat(i, i.operands[0], more), i.operands[1].i

    def effect(w: Wave) -> None:
        addresses, inside = address(w)
        data = words(w, register, 4 if upper else size, inside)
        w.workgroup.memory.scatter(addresses[inside], data[:, 2 : 2 + size] if upper else data)

    return effect


def _add_bf16(old: Vector, new: Vector) -> Vector:
    total = from_bf16(old.view(U16).astype(U32)) + from_bf16(new.view(U16).astype(U32))
    return to_bf16(total).astype(U16).view(U32)


_ATOMICS: dict[str, tuple[type, Callable[[Vector, Vector], Vector]]] = {
    "add": (U32, lambda old, new: old + new),
    "sub": (U32, lambda old, new: old - new),
    "or": (U32, lambda old, new: old | new),
    "and": (U32, lambda old, new: old & new),
    "xor": (U32, lambda old, new: old ^ new),
    "umax": (U32, np.maximum),
    "umin": (U32, np.minimum),
    "smax": (I32, np.maximum),
    "smin": (I32, np.minimum),
    "swap": (U32, lambda old, new: new),
    "add_f32": (F32, lambda old, new: old + new),
    "pk_add_f16": (U32, lambda old, new: (old.view(F16) + new.view(F16)).view(U32)),
    "pk_add_bf16": (U32, _add_bf16),
    "add_x2": (U64, lambda old, new: old + new),
    "or_x2": (U64, lambda old, new: old | new),
    "umax_x2": (U64, np.maximum),
    "umin_x2": (U64, np.minimum),
    "swap_x2": (U64, lambda old, new: new),
    "add_f64": (F64, lambda old, new: old + new),
}


def _atomic_parts(i: Instruction, size: int) -> tuple[Address, int, bool]:
    """Return addresses, the register of the data, and whether the old value is wanted (in the first operand)."""
    returns = "sc0" in i.modifiers or "glc" in i.modifiers
    if i.name.startswith("buffer"):
        return _address(i, 1, size), i.operands[0].i, returns
    first = 1 if returns else 0
    more = i.operands[first + 2] if len(i.operands) > first + 2 else None
    return _flat(i, i.operands[first], more), i.operands[first + 1].i, returns


@means(*(f"{space}_atomic_{name}" for space in _SPACES for name in _ATOMICS))
def _atomic(i: Instruction) -> Effect:
    dtype, function = _ATOMICS[i.name.split("_atomic_", 1)[1]]
    size = np.dtype(dtype).itemsize
    address, register, returns = _atomic_parts(i, size)

    def effect(w: Wave) -> None:
        addresses, inside = address(w)
        new: Vector = np.ascontiguousarray(words(w, register, size, inside)).view(dtype)
        old = np.empty_like(new)
        for lane, at in enumerate(map(int, addresses[inside])):
            held: Vector = w.workgroup.memory.view(at, size).view(dtype)
            old[lane] = held
            held[:] = function(held.copy(), new[lane].copy())
        if returns:
            put_bytes(w, i.operands[0].i, old.view(U8).reshape(len(old), size), inside)

    return effect


@means(*(f"{space}_atomic_cmpswap{x2}" for space in _SPACES for x2 in ("", "_x2")))
def _compare_and_swap(i: Instruction) -> Effect:
    size = 8 if i.name.endswith("_x2") else 4
    address, register, returns = _atomic_parts(i, size)

    def effect(w: Wave) -> None:
        addresses, inside = address(w)
        pairs = words(w, register, 2 * size, inside)  # the new value, then the one that is expected
        old = np.empty((len(pairs), size), U8)
        for lane, at in enumerate(map(int, addresses[inside])):
            held = w.workgroup.memory.view(at, size)
            old[lane] = held
            if (held == pairs[lane, size:]).all():
                held[:] = pairs[lane, :size]
        if returns:
            put_bytes(w, i.operands[0].i, old, inside)

    return effect


@means("buffer_wbl2", "buffer_inv", "buffer_wbinvl1", "buffer_wbinvl1_vol")
def _cache(i: Instruction) -> Effect:
    return lambda w: None
