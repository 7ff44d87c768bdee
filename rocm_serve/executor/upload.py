"""Small arrays of a step to the device: packed into one pinned buffer, one transfer that the host does not wait for."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, np.dtype[Any]]

_ALIGN = 16
_FIRST_BYTES = 1 << 16
_BUFFERS = 12  # on their way at a time before the host waits for the oldest; a step sends two to five


def offsets(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return where fields of so many bytes begin in a buffer, and its length."""
    return tuple(accumulate((size + -size % _ALIGN for size in sizes), initial=0))


def views_of(memory: torch.Tensor, arrays: Sequence[Array]) -> list[torch.Tensor]:
    """Return a view of `memory`, bytes, for each array, from its place of `offsets` on."""
    at = offsets([array.nbytes for array in arrays])
    return [
        memory[start : start + array.nbytes].view(torch.from_numpy(array).dtype).view(array.shape)
        for start, array in zip(at, arrays, strict=False)
    ]


class _Staging:
    """A pinned buffer of the host and its last transfer."""

    def __init__(self) -> None:
        self.bytes = torch.empty(0, dtype=torch.uint8)
        self._sent: torch.cuda.Event | None = None

    def room(self, size: int) -> torch.Tensor:
        """Return `size` bytes to write to, once what was in them before has left."""
        if self._sent is not None:
            self._sent.synchronize()
        if self.bytes.numel() < size:
            room = max(_FIRST_BYTES, 1 << (size - 1).bit_length())
            self.bytes = torch.empty(room, dtype=torch.uint8, pin_memory=True)
        return self.bytes[:size]

    def leaves(self) -> None:
        self._sent = self._sent or torch.cuda.Event()
        self._sent.record()


class Upload:
    """One per thread and device. On a CPU arrays are where they should be, and their memory is shared."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._staging = [] if device.type == "cpu" else [_Staging() for _ in range(_BUFFERS)]
        self._next = 0

    def __call__(self, *arrays: Array) -> list[torch.Tensor]:
        """Return arrays as new tensors on the device."""
        if not self._staging:
            return [torch.from_numpy(array) for array in arrays]
        room = offsets([array.nbytes for array in arrays])[-1]
        arrived = torch.empty(room, dtype=torch.uint8, device=self.device)
        self.into(arrived, arrays)
        return views_of(arrived, arrays)

    def into(self, target: torch.Tensor, arrays: Sequence[Array]) -> None:
        """Write arrays to the beginning of `target`, bytes on the device, each from its place of `offsets` on."""
        at = offsets([array.nbytes for array in arrays])
        assert target.numel() >= at[-1], f"{at[-1]} bytes for a buffer of {target.numel()}"
        if not self._staging:
            _write(target.numpy(), at, arrays)
            return
        staging = self._staging[self._next]
        self._next = (self._next + 1) % _BUFFERS
        room = staging.room(at[-1])
        _write(room.numpy(), at, arrays)
        target[: at[-1]].copy_(room, non_blocking=True)
        staging.leaves()


def _write(into: Array, at: Sequence[int], arrays: Sequence[Array]) -> None:
    for start, array in zip(at, arrays, strict=False):
        into[start : start + array.nbytes].view(array.dtype).reshape(array.shape)[...] = array
