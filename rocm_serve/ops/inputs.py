"""Random inputs that the cases of several ops share. No case depends on global random state."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rocm_serve.ops.batch import Sequences
from rocm_serve.ops.contract import Arguments
from rocm_serve.ops.fp8 import BLOCK, FN, FNUZ, FNUZ_SCALE, fn_to_fnuz

# The scale of an FP8 argument: both change when its dialect does.
SCALE_OF = {
    "weight_NK": "scale",
    "x_TH": "x_scale",
    "w13_EIH": "w13_scale",
    "w2_EHI": "w2_scale",
    "k_pages_PSGD": "k_scale",
    "v_pages_PSGD": "v_scale",
}


def normal(g: torch.Generator, *shape: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return normally distributed numbers."""
    return (torch.randn(shape, generator=g) * scale).to(dtype)


def sequences_of(
    g: torch.Generator, rows: Sequence[int], contexts: Sequence[int], *, page_size: int = 16, first_row: int = 0
) -> tuple[Sequences, int]:
    """Lay sequences out one after the other, with shuffled pages and slots; return them and the number of pages."""
    starts = [first_row]
    for n in rows:
        starts.append(starts[-1] + n)
    needed = [-(-(n + c) // page_size) for n, c in zip(rows, contexts, strict=True)]
    order = torch.randperm(sum(needed) + 2, generator=g)
    table = torch.full((len(rows), max(needed, default=0) + 1), -1, dtype=torch.int32)
    at = 0
    for b, count in enumerate(needed):
        table[b, :count] = order[at : at + count]
        at += count
    slots = (1 + torch.randperm(len(rows), generator=g)).tolist()
    made = Sequences(
        row_starts=tuple(starts),
        contexts=tuple(contexts),
        slots=tuple(slots),
        num_recurrent=0,
        row_starts_B1=torch.tensor(starts, dtype=torch.int32),
        contexts_B=torch.tensor(list(contexts), dtype=torch.int32),
        slots_B=torch.tensor(slots, dtype=torch.int32),
        page_table_BP=table,
    )
    return made, sum(needed) + 2


def block_fp8(g: torch.Generator, *shape: int, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an FP8 weight [..., N, K] and its fp32 scales, every block of another magnitude."""
    w = torch.randn(shape, generator=g)
    blocks = (*shape[:-2], -(-shape[-2] // BLOCK), -(-shape[-1] // BLOCK))
    wide = torch.rand(blocks, generator=g) * 1.5 + 0.5
    return (w * 100).clamp(-448, 448).to(torch.float8_e4m3fn), wide * (scale / 100)


def in_fnuz(arguments: Arguments) -> Arguments:
    """Return the arguments of a case as gfx942 has them: the same numbers, FP8 in e4m3fnuz with its scales doubled."""
    made = dict(arguments)
    for name, value in arguments.items():
        if value is FN:  # a dtype that is asked for
            made[name] = FNUZ
        elif isinstance(value, torch.Tensor) and value.dtype is FN:
            scale = arguments.get(SCALE_OF[name], 1.0)
            assert isinstance(scale, float | torch.Tensor)
            made[name], made[SCALE_OF[name]] = fn_to_fnuz(value), scale * FNUZ_SCALE
    return made
