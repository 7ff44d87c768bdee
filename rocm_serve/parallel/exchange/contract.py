"""What an MoE layer knows of the ranks that share its experts.

Letters: T rows of the step, n of this rank, R that came here, H width, k choices a row, t tensor-parallel ranks.

The ranks are those of the stage's tensor-parallel group, whatever the expert degree: with fewer expert ranks than
tensor-parallel ones an expert is cut in slices, a row goes to every slice of its experts, and sums over ranks join
slices and experts alike.

Experts may one day sit on ranks without attention (`RemoteExperts`). Such a placement receives hidden states and router
logits, because routing then belongs to the ranks that know their own load, and returns routed plus shared, complete:
the layer that calls it holds no expert and no shared expert, asks neither question of an `ExpertExchange`, and reduces
nothing. Nothing implements it yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class Dispatched:
    """What this rank's experts have to do, and what `combine` needs to bring the results home.

    Shapes: rows [R, H] in the model's dtype, or FP8 with fp32 `scales` [R, H / 128]; ids int32 [R, k], slots of this
    rank from 0 on, -1 for choices held elsewhere; weights fp32 [R, k]. Rows from `count` (int, or an int tensor on the
    device) on are padding whose content means nothing.
    """

    rows: torch.Tensor
    scales: torch.Tensor | None
    ids: torch.Tensor
    weights: torch.Tensor
    count: int | torch.Tensor
    context: object = None  # of the exchange that made it


@dataclass(frozen=True, slots=True)
class ExchangeSpec:
    """What one layer asks of an exchange. Layers with equal specs share one.

    `name`: local, torch, all_gather or mori. `capacity`: the most rows that a rank brings. `dtype`: of the model's
    rows, and of what comes back. `fp8_rows`: rows are sent as FP8 with a fp32 scale for each 128 columns.
    """

    name: str
    ep: int
    slots_per_rank: int
    top_k: int
    hidden_size: int
    capacity: int
    dtype: torch.dtype
    fp8_rows: bool = False

    @property
    def scales_a_row(self) -> int:
        return self.hidden_size // 128 if self.fp8_rows else 0

    def refuse_unfit(self, rows_nH: torch.Tensor, scales: torch.Tensor | None, num_rows: int | torch.Tensor) -> None:
        """Raise ValueError for rows that the exchange was not built for."""
        brought = num_rows if isinstance(num_rows, int) else rows_nH.shape[0]
        if brought > self.capacity:
            raise ValueError(f"{brought} rows, but the exchange {self.name} takes {self.capacity} of a rank")
        width = 0 if scales is None else scales.shape[1]
        if width != self.scales_a_row:
            raise ValueError(f"{width} scales a row, but the exchange {self.name} was built for {self.scales_a_row}")

    def describe(self, world: int) -> str:
        """One line for a rank's log."""
        row = "fp8 1x128" if self.fp8_rows else str(self.dtype).removeprefix("torch.")
        sends = f"at most {self.capacity} rows a rank, rows sent as {row}"
        return (
            f"expert exchange {self.name}: {world} ranks, {self.ep} x {self.slots_per_rank} expert slots,"
            f" hidden {self.hidden_size}, top-{self.top_k}, {'no rows are sent' if self.name == 'local' else sends}"
        )


class ExpertExchange(Protocol):
    """Brings rows to experts and their results back. Built on every rank when the model is built, in the same order."""

    name: str
    complete: bool
    """What `combine` returns is the sum over all experts: nothing is left to reduce."""
    scattered: bool
    """`dispatch` takes this rank's rows only (see `scatter`); the shared expert is whole on every rank."""
    graph_refusal: str | None
    """Why a step that uses it cannot be captured as a device graph, its collectives apart; None: it can."""

    def scatter(self, x_TH: torch.Tensor, num_rows: int | torch.Tensor) -> tuple[torch.Tensor, int | torch.Tensor]:
        """Return this rank's rows of x, and how many of them are no padding. Only where `scattered`.

        A share is ceil(n / t) consecutive rows for n = `num_rows` known on the host, else ceil(T / t); it is padded
        with zeros to the row multiple of the machine. The last ranks may have none, and take part all the same.
        """
        ...

    def gather(self, own_nH: torch.Tensor, rows: int, num_rows: int | torch.Tensor) -> torch.Tensor:
        """Undo `scatter` of [rows, H] with the same `num_rows`: every rank's rows, in order. Only where `scattered`.

        Rows from a `num_rows` known on the host on come out as zeros.
        """
        ...

    def dispatch(
        self,
        rows_nH: torch.Tensor,
        scales: torch.Tensor | None,
        ids_nk: torch.Tensor,
        weights_nk: torch.Tensor,
        num_rows: int | torch.Tensor,
    ) -> Dispatched:
        """Bring rows to the ranks that hold their choices. A collective: called with no rows too.

        Shapes: rows [n, H] in the model's dtype, or FP8 with fp32 scales [n, H / 128]; ids int [n, k] of slots over
        all ranks, negative for none; weights fp32 [n, k]. n is the same on every rank, `num_rows` need not be. Rows
        from `num_rows` on are padding and go nowhere.
        Errors: ValueError for more rows than the capacity it was built for.
        """
        ...

    def combine(self, returned_RH: torch.Tensor, dispatched: Dispatched) -> torch.Tensor:
        """Bring results home: [n, H], this rank's partial sum, or (`complete`) the sum over all ranks. A collective.

        Shapes: returned [R, H], each row the weighted sum over this rank's experts. Padding rows come out as zeros.
        """
        ...


class RemoteExperts(Protocol):
    """Attention and experts on different ranks: see the top of this file. A type only."""

    def __call__(self, hidden_TH: torch.Tensor, router_logits_TE: torch.Tensor) -> torch.Tensor:
        """Return routed plus shared, complete: [T, H]."""
        ...
