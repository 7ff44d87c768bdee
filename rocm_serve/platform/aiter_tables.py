"""What AITER's tables of tuned kernels hold for a shape. The files are read, AITER is not imported. Imports no torch.

A table is a CSV below the package's `configs`, one row for each measured shape and number of rows. A shape without a
row runs a kernel that AITER's code chooses by rule. Of several columns only those that name a shape are read:

    products  gfx (newer files), cu_num, M, N, K
    experts   gfx (newer files), cu_num, token, model_dim, inter_dim, expert, topk, q_type
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType

FP8_PRODUCTS = "a8w8_blockscale_bpreshuffle_tuned_gemm"
BF16_PRODUCTS = "bf16_tuned_gemm"
EXPERTS = "tuned_fmoe"
_PER_BLOCK = "QuantType.per_1x128"
_PLAIN = "QuantType.No"
# A row without gfx belongs to the card that has so many compute units.
_GFX_OF_UNITS: Mapping[str, str] = MappingProxyType({"304": "gfx942", "80": "gfx942", "256": "gfx950"})


def tuned_products(folder: Path, table: str, arch: str, units: int, rows: int, columns: int) -> tuple[int, ...]:
    """List the row counts for which a product with a weight [rows, columns] is tuned on this card, ascending."""
    shape = {"N": str(rows), "K": str(columns)}
    return _counts(_matching(folder, table, arch, units, shape), "M")


def tuned_experts(
    folder: Path, arch: str, units: int, *, hidden: int, width: int, experts: int, top_k: int, fp8: bool
) -> tuple[int, ...]:
    """List the row counts for which an MoE layer is tuned on this card, ascending."""
    shape = {
        "model_dim": str(hidden),
        "inter_dim": str(width),
        "expert": str(experts),
        "topk": str(top_k),
        "q_type": _PER_BLOCK if fp8 else _PLAIN,
    }
    return _counts(_matching(folder, EXPERTS, arch, units, shape), "token")


def _counts(rows: Iterator[Mapping[str, str]], column: str) -> tuple[int, ...]:
    return tuple(sorted({int(row[column]) for row in rows if row[column].isdigit()}))


def _matching(folder: Path, table: str, arch: str, units: int, shape: Mapping[str, str]) -> Iterator[Mapping[str, str]]:
    for row in _rows(folder, table):
        card = row.get("gfx") or _GFX_OF_UNITS.get(row.get("cu_num", ""), "")
        here = card == arch and row.get("cu_num") == str(units)
        if here and all(row.get(column) == value for column, value in shape.items()):
            yield row


@lru_cache(maxsize=8)
def _rows(folder: Path, table: str) -> tuple[Mapping[str, str], ...]:
    """Read every file of one kind: the general one and those of models."""
    found: list[Mapping[str, str]] = []
    for where in (folder / "configs", folder / "configs" / "model_configs"):
        for path in sorted(where.glob("*.csv")):
            if table in path.stem and f"un{table}" not in path.stem and "untuned" not in path.stem:
                with path.open(newline="", encoding="utf-8") as file:
                    found += [row for row in csv.DictReader(file) if None not in row]
    return tuple(found)
