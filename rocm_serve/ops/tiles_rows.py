"""Tiles of the kernels that pass once over rows, by rule; see tiles.py. Nothing is looked up: no torch.

Each is a pure function of sizes and card, so that a trial can put another in its place.
"""

from __future__ import annotations

Tile = dict[str, int]

_FEW_ROWS = 64
_CONV_ROWS = 16  # of a sequence in one program: 3 more are read before them
_LANE = 8  # numbers of 2 bytes that a lane loads at once
_FEW_ROWS_OF_HEADS = 512  # above them a program has eight heads, not two: 16 numbers a lane of 64, 32 of 32
_KV_ELEMENTS = 1024  # of K and as many of V: a wavefront of 64 then writes FP8 in pieces of 16 bytes


def quantise_rows_tile(rows: int) -> Tile:
    """Choose how many blocks of 128 columns, one after the other, a program quantises; INVERSE: a division for a block
    and two steps for a number give the codes that a division for each gives (H200, 2026-12-01: 33.6 million alike).
    """
    few = rows <= _FEW_ROWS
    return {"BLOCKS": 4 if few else 16, "INVERSE": 1, "num_warps": 1 if few else 2}


def causal_conv_tile(arch: str, *, one_row: bool) -> Tile:
    """Choose rows and channels of a program. `one_row`: no sequence has more.

    Every lane has 16 bytes of each row; of many rows half as much on NVIDIA, for whose registers that was faster (H200,
    2026-12-01, 8192 channels, 2048 rows 24.1 us instead of 29.0).
    """
    lane = _LANE if one_row or arch.startswith("gfx") else _LANE // 2
    return {"ROWS": 1 if one_row else _CONV_ROWS, "COLUMNS": lane * _lanes(arch), "num_warps": 1}


def kv_write_tile(width: int) -> Tile:
    """Choose how many rows of K and of V a program writes, and how much of a row."""
    block = min(_KV_ELEMENTS, 1 << max(width - 1, 0).bit_length())
    return {"ROWS": _KV_ELEMENTS // block, "BLOCK": block, "num_warps": 1}


def qk_norm_rope_kv_write_tile(rows: int) -> Tile:
    """Choose how many heads a program has."""
    return {"BLOCK_H": 2, "num_warps": 1} if rows <= _FEW_ROWS_OF_HEADS else {"BLOCK_H": 8, "num_warps": 2}


def _lanes(arch: str) -> int:
    return 64 if arch.startswith("gfx") else 32
