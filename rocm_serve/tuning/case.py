"""One op at one size, and what the cases of several ops share. Letters: B sequences, P pages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from rocm_serve.ops.batch import Sequences
from rocm_serve.ops.bind import REFERENCE
from rocm_serve.ops.tiles_linear import SHARED_ROWS
from rocm_serve.tuning import floor
from rocm_serve.tuning.floor import Cost
from rocm_serve.tuning.operands import SLOTS, Bench
from rocm_serve.tuning.timing import Call

PAGE = 16


@dataclass(frozen=True, slots=True)
class Case:
    """One op at one size. `calls` go through sets of operands; `check` returns the relative L2 of sampled rows.

    `check_cut`: the same of three quarters of the rows; where an op takes that, a device counts them and choices are
    held elsewhere. None for a case that has no such check. `pure`: a call makes the same bits each time.
    """

    op: str
    what: str
    cost: Cost
    calls: Sequence[Call]
    check: Callable[[], float]
    distinct: float | None = None
    peers: Mapping[str, Sequence[Call]] = field(default_factory=dict)
    check_cut: Callable[[], float] | None = None
    pure: bool = False


def one_row_each(sequences: Sequences, rows: Sequence[int], slots: Sequence[int]) -> Sequences:
    """Return one-row sequences out of others, as rows 0.. of a new batch with new slots."""
    index = torch.tensor(list(rows), device=sequences.slots_B.device)
    return replace(
        sequences,
        row_starts=tuple(range(len(rows) + 1)),
        contexts=tuple(sequences.contexts[i] for i in rows),
        slots=tuple(slots),
        num_recurrent=len(rows),
        row_starts_B1=sequences.row_starts_B1[: len(rows) + 1],
        contexts_B=sequences.contexts_B[index],
        slots_B=torch.tensor(list(slots), dtype=torch.int32, device=index.device),
        page_table_BP=sequences.page_table_BP[index],
    )


def product_of(bench: Bench, name: str, rows: int) -> tuple[int, int]:
    """Return the rows and columns of a bf16 weight, or of several that layers multiply some rows with at once."""
    opener = rows <= SHARED_ROWS and bench.ops.providers["shared_down_add"].name != REFERENCE
    return {**floor.linears_of(bench.dims), **floor.readers_of(bench.dims, opener=opener)}[name]


def pool_of(bench: Bench) -> int:
    return 8 if bench.small and not bench.hollow else SLOTS


def decoding_sets(bench: Bench, rows: int, sets: int) -> list[Sequences]:
    """Return sets of sequences at random slots; sets share no slot as long as the pool lasts."""
    slots = pool_of(bench)
    assert rows <= slots, f"{rows} states in a pool of {slots}"
    each = slots // rows
    decks = [[1 + slot for slot in bench.deck(slots)] for _ in range(-(-sets // each))]
    return [bench.decoding(decks[i // each][i % each * rows : (i % each + 1) * rows], 0) for i in range(sets)]
