"""Every rank holds every row and runs its own experts; the layer's one all-reduce joins them."""

from __future__ import annotations

import torch

from rocm_serve.parallel.comm import Comm
from rocm_serve.parallel.exchange.contract import Dispatched, ExchangeSpec
from rocm_serve.parallel.exchange.shares import ep_rank_of, local_slots


class LocalExchange:
    """Moves nothing: `dispatch` marks the choices that this rank holds, `combine` returns its partial sums."""

    name = "local"
    complete = False
    scattered = False
    graph_refusal: str | None = None

    def __init__(self, spec: ExchangeSpec, comm: Comm) -> None:
        self.spec = spec
        self._ep_rank = ep_rank_of(comm, spec.ep)

    def scatter(self, x_TH: torch.Tensor, num_rows: int | torch.Tensor) -> tuple[torch.Tensor, int | torch.Tensor]:
        raise AssertionError("the local exchange has every row on every rank")

    def gather(self, own_nH: torch.Tensor, rows: int, num_rows: int | torch.Tensor) -> torch.Tensor:
        raise AssertionError("the local exchange has every row on every rank")

    def dispatch(
        self,
        rows_nH: torch.Tensor,
        scales: torch.Tensor | None,
        ids_nk: torch.Tensor,
        weights_nk: torch.Tensor,
        num_rows: int | torch.Tensor,
    ) -> Dispatched:
        """See contract.py."""
        ids = ids_nk if self.spec.ep == 1 else local_slots(ids_nk, self._ep_rank, self.spec.slots_per_rank)
        return Dispatched(rows_nH, scales, ids, weights_nk, num_rows)

    def combine(self, returned_RH: torch.Tensor, dispatched: Dispatched) -> torch.Tensor:
        """See contract.py."""
        return returned_RH
