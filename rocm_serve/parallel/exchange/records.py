"""Rows with everything that travels with them, as bytes: one collective call instead of four."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Record:
    """Widths of the parts of one row's record: row, scales, ids, weights; the part's dtype decides its bytes.

    The FP8 type is whatever the sender's machine has; all ranks of a stage have the same.
    """

    hidden_size: int
    dtype: torch.dtype
    scales: int  # fp32 scales a row
    top_k: int

    @property
    def _widths(self) -> list[int]:
        return [self.hidden_size * self.dtype.itemsize, 4 * self.scales, 4 * self.top_k, 4 * self.top_k]

    @property
    def num_bytes(self) -> int:
        return sum(self._widths)

    def pack(
        self, rows: torch.Tensor, scales: torch.Tensor | None, ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Return uint8 [n, num_bytes]."""
        parts = [rows, *([] if scales is None else [scales]), ids.to(torch.int32), weights]
        return torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=1)

    def unpack(
        self, packed: torch.Tensor, pad_to: int
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
        """Undo `pack`, each part padded to `pad_to` rows: rows, scales and weights with zeros, ids with -1."""
        kinds = [(self.hidden_size, self.dtype), (self.scales, torch.float32)]
        kinds += [(self.top_k, torch.int32), (self.top_k, torch.float32)]
        parts = []
        for piece, (width, dtype) in zip(packed.split(self._widths, dim=1), kinds, strict=True):
            part = torch.empty(pad_to, width, dtype=dtype, device=packed.device)
            if width:
                part.view(torch.uint8)[: piece.shape[0]] = piece
                part.view(torch.uint8)[piece.shape[0] :] = 0
            parts.append(part)
        rows, scales, ids, weights = parts
        ids[packed.shape[0] :] = -1
        return rows, scales if self.scales else None, ids, weights
