"""A product whose elements have the same bits at any width, to compare two weights joined into one with both apart."""

from __future__ import annotations

import torch


def by_column(x_TK: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
    """Multiply as ops.linear does, and sum every element by itself.

    A float32 product of torch gives a column bits by the width N, too: on a processor without AVX-512, MKL takes other
    code where N is below 12, as of a router or of a few heads' gates. Rows are padded against the like; widths are not,
    for those of a model stay as they are.
    """
    return (x_TK[:, None] * weight_NK).sum(-1)
