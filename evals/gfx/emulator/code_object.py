"""Loads an AMD GPU code object (ELF, HSA versions 5 and 6) without ROCm: segments, kernel descriptors, metadata."""

from __future__ import annotations

import ctypes
import mmap
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

_AMDGPU = 224
_MACHINES = {0x4C: "gfx942", 0x4F: "gfx950"}
_LOAD, _NOTE = 1, 4
_DYNAMIC_SYMBOLS = 11
_RELOCATIONS = 4
_METADATA = 32
_PAGE = 4096
Value = int | float | bytes


@dataclass(frozen=True, slots=True)
class Descriptor:
    """The 64 bytes that the hardware reads before a kernel starts."""

    lds: int
    scratch: int
    entry: int  # address
    rsrc2: int
    properties: int
    preload: int  # kernel arguments already in SGPRs: count in the low 7 bits, offset in dwords above


class CodeObject:
    """One loaded ELF. `kernels` maps a name to its metadata, as the compiler wrote it."""

    def __init__(self, data: bytes) -> None:
        if data[:4] != b"\x7fELF" or struct.unpack_from("<H", data, 18)[0] != _AMDGPU:
            raise ValueError("not a code object of an AMD GPU")
        self.arch = _MACHINES.get(struct.unpack_from("<I", data, 48)[0] & 0xFF, "unknown")
        program, sections = struct.unpack_from("<QQ", data, 32)
        sizes = struct.unpack_from("<HHHH", data, 54)
        headers = [struct.unpack_from("<IIQQQQQQ", data, program + i * sizes[0]) for i in range(sizes[1])]
        tables = [struct.unpack_from("<IIQQQQIIQQ", data, sections + i * sizes[2]) for i in range(sizes[3])]
        self._load(data, headers)
        metadata = _metadata(data, headers)
        self.kernels: dict[str, Any] = {kernel[".name"]: kernel for kernel in metadata["amdhsa.kernels"]}
        self.symbols = _symbols(data, tables)

    def _load(self, data: bytes, headers: Sequence[tuple[int, ...]]) -> None:
        loads = [header for header in headers if header[0] == _LOAD]
        self.size = max(header[3] + header[6] for header in loads)
        self._memory = mmap.mmap(-1, -(-self.size // _PAGE) * _PAGE)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        for _, _, offset, address, _, in_file, _, _ in loads:
            self._memory[address : address + in_file] = data[offset : offset + in_file]

    def descriptor(self, kernel: str) -> Descriptor:
        """Return the descriptor of a kernel."""
        at, _ = self.symbols[f"{kernel}.kd"]
        lds, scratch, _, _, entry = struct.unpack_from("<IIIIq", self._memory, at)
        (rsrc2,) = struct.unpack_from("<I", self._memory, at + 52)
        properties, preload = struct.unpack_from("<HH", self._memory, at + 56)
        return Descriptor(lds, scratch, self.base + at + entry, rsrc2, properties, preload)


def _metadata(data: bytes, headers: Sequence[tuple[int, ...]]) -> Any:
    for kind, _, offset, _, _, size, _, _ in headers:
        at = offset
        while kind == _NOTE and at < offset + size:
            name_size, body_size, note = struct.unpack_from("<III", data, at)
            at += 12 + -(-name_size // 4) * 4
            if note == _METADATA:
                return msgspec.msgpack.decode(data[at : at + body_size])
            at += -(-body_size // 4) * 4
    raise ValueError("the code object has no metadata")


def _symbols(data: bytes, tables: Sequence[tuple[int, ...]]) -> dict[str, tuple[int, int]]:
    """Return (address, size) by name."""
    found = {}
    for table in tables:
        if table[1] == _RELOCATIONS and table[5]:
            raise ValueError("the code object has relocations, which this loader does not apply")
        if table[1] == _DYNAMIC_SYMBOLS:
            names = tables[table[6]][4]
            for at in range(table[4], table[4] + table[5], 24):
                name, _, _, _, value, size = struct.unpack_from("<IBBHQQ", data, at)
                found[data[names + name : data.index(b"\0", names + name)].decode()] = (value, size)
    return found


def own_arguments(kernel: Any) -> list[Any]:
    """Return the metadata of the arguments that a caller passes."""
    return [a for a in kernel[".args"] if a[".value_kind"] in ("global_buffer", "by_value")]


def pack_arguments(kernel: Any, values: Sequence[Value], grid: Sequence[int], block: Sequence[int]) -> bytes:
    """Lay out the kernel's argument segment: `values` in order, then the hidden arguments that the HIP runtime fills.

    A structure is given as its bytes.

    Errors: ValueError when `values` are more or fewer than the kernel's own arguments.
    """
    segment = bytearray(kernel[".kernarg_segment_size"])
    own = own_arguments(kernel)
    if len(own) != len(values):
        raise ValueError(f"{kernel['.name']} takes {len(own)} arguments, not {len(values)}")
    for argument, value in zip(own, values, strict=True):
        segment[argument[".offset"] : argument[".offset"] + argument[".size"]] = _packed(value, argument[".size"])
    for argument in kernel[".args"]:
        kind, at, size = argument[".value_kind"], argument[".offset"], argument[".size"]
        hidden = {
            "hidden_block_count_": grid,
            "hidden_group_size_": block,
        }.get(kind[:-1])
        if hidden is not None:
            segment[at : at + size] = hidden["xyz".index(kind[-1])].to_bytes(size, "little")
        elif kind == "hidden_grid_dims":
            segment[at : at + size] = (1).to_bytes(size, "little")
    return bytes(segment)


def _packed(value: Value, size: int) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, float):
        return struct.pack("<f" if size == 4 else "<d", value)
    return (value & ((1 << (8 * size)) - 1)).to_bytes(size, "little")


def user_sgprs(descriptor: Descriptor, arguments: int) -> list[int]:
    """Return the SGPRs that are set before the first instruction; `arguments` is the address of the segment."""
    properties, words = descriptor.properties, []
    for bit, values in (
        (1, [0] * 4),  # private segment buffer
        (2, [0, 0]),  # dispatch packet
        (4, [0, 0]),  # queue
        (8, [arguments & 0xFFFFFFFF, arguments >> 32]),
        (16, [0, 0]),  # dispatch id
        (32, [0, 0]),  # flat scratch
        (64, [0]),  # private segment size
    ):
        if properties & bit:
            words += values
    count, offset = descriptor.preload & 0x7F, descriptor.preload >> 7
    return words + list(struct.unpack(f"<{count}I", ctypes.string_at(arguments + 4 * offset, 4 * count)))
