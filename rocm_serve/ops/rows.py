"""What keeps a row's bits independent of its neighbours, its place and the number of threads on the CPU.

Measured on torch 2.9-2.13 with MKL: a matrix product gives a row the same bits for any row count that is a multiple
of 32; elementwise functions give other bits in the scalar tail of a vectorised loop, and where threads cut the range.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

ROW_MULTIPLE = 32
_PIECE = 16384  # elements; torch runs fewer than 32768 on one thread


def pad_rows(x: torch.Tensor) -> torch.Tensor:
    """Append zero rows (dimension 0) up to a multiple of 32."""
    missing = -x.shape[0] % ROW_MULTIPLE
    return F.pad(x, (0, 0) * (x.dim() - 1) + (0, missing)) if missing else x


def steady(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Apply an elementwise function with the same bits for an element wherever it stands.

    On the CPU every element goes through the vector path, on one thread per piece. Other devices compute each
    element alone, so the function is applied as it is.
    """
    if x.device.type != "cpu":
        return function(x)
    flat = x.reshape(-1)
    missing = -flat.numel() % ROW_MULTIPLE
    if missing:
        flat = F.pad(flat, (0, missing))
    if flat.numel() <= _PIECE:
        y = function(flat)
    else:
        y = torch.cat([function(piece) for piece in flat.split(_PIECE)])
    return y[: x.numel()].view(x.shape)
