"""Global memory: the buffers that a launch was given, and nothing else."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np

from evals.gfx.emulator.formats import U8, U64, Vector


class EmulatorError(RuntimeError):
    """The program did what it may not do, or what this emulator does not know."""


@dataclass(frozen=True, slots=True)
class Region:
    """Bytes [start, stop) of this process."""

    start: int
    stop: int
    bytes_: Vector
    name: str
    read_only: bool


class Memory:
    """Regions by address. A gather or scatter of 64 lanes is one numpy step where all lanes fall into one region."""

    def __init__(self) -> None:
        self._regions: list[Region] = []

    def add(self, address: int, size: int, name: str, *, read_only: bool = False) -> None:
        """Let the program use [address, address + size)."""
        if size:
            held = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
            self._regions.append(Region(address, address + size, held, name, read_only))

    def find(self, start: int, stop: int, *, write: bool) -> Region:
        """Return the region that holds [start, stop). Errors: EmulatorError naming the nearest one."""
        for region in self._regions:
            if region.start <= start and stop <= region.stop:
                if write and region.read_only:
                    raise EmulatorError(f"store to {region.name}, which is read-only")
                return region
        word = "store" if write else "load"
        near = min(self._regions, key=lambda r: min(abs(start - r.start), abs(start - r.stop)), default=None)
        where = f"{start - near.start} bytes into {near.name} of {near.stop - near.start} bytes" if near else "nothing"
        raise EmulatorError(f"{word} outside every buffer: {stop - start} bytes at {start:#x}; nearest: {where}")

    def gather(self, addresses: Vector, size: int) -> Vector:
        """Load `size` bytes at each address: uint64 [k] -> uint8 [k, size]."""
        if len(addresses) == 0:
            return np.zeros((0, size), U8)
        region = self._common(addresses, size, write=False)
        if region is not None:
            at = (addresses - U64(region.start)).astype(np.int64)
            found: Vector = region.bytes_[at[:, None] + np.arange(size)]
            return found
        rows = []
        for address in map(int, addresses):
            region = self.find(address, address + size, write=False)
            rows.append(region.bytes_[address - region.start : address - region.start + size])
        return np.stack(rows)

    def scatter(self, addresses: Vector, data: Vector) -> None:
        """Store data uint8 [k, size] at each address."""
        size = data.shape[1]
        if len(addresses) == 0:
            return
        region = self._common(addresses, size, write=True)
        if region is not None:
            at = (addresses - U64(region.start)).astype(np.int64)
            region.bytes_[at[:, None] + np.arange(size)] = data
            return
        for address, row in zip(map(int, addresses), data, strict=True):
            self.view(address, size)[:] = row

    def view(self, address: int, size: int) -> Vector:
        """Return writable bytes, for one lane's read-modify-write."""
        region = self.find(address, address + size, write=True)
        return region.bytes_[address - region.start : address - region.start + size]

    def _common(self, addresses: Vector, size: int, *, write: bool) -> Region | None:
        start, stop = int(addresses.min()), int(addresses.max()) + size
        for region in self._regions:
            if region.start <= start and stop <= region.stop and not (write and region.read_only):
                return region
        return None
