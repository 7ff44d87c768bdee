"""Every rank gets every row; sums are scattered again. Fixed shapes and no wait for the device: can be captured."""

from __future__ import annotations

import torch

from rocm_serve.parallel.comm import Comm, sum_in_rank_order
from rocm_serve.parallel.exchange.contract import Dispatched, ExchangeSpec
from rocm_serve.parallel.exchange.records import Record
from rocm_serve.parallel.exchange.shares import Shares, ep_rank_of, local_slots, padding_rows


class AllGatherExchange(Shares):
    """One gather out (rows with their ids, weights and scales as bytes), one all-to-all of partial sums back.

    Padding rows travel too, with ids of -1.
    """

    name = "all_gather"
    graph_refusal: str | None = None

    def __init__(self, spec: ExchangeSpec, comm: Comm, row_multiple: int) -> None:
        super().__init__(comm, row_multiple)
        self.spec = spec
        self._ep_rank = ep_rank_of(comm, spec.ep)

    def dispatch(
        self,
        rows_nH: torch.Tensor,
        scales: torch.Tensor | None,
        ids_nk: torch.Tensor,
        weights_nk: torch.Tensor,
        num_rows: int | torch.Tensor,
    ) -> Dispatched:
        """See contract.py."""
        spec = self.spec
        spec.refuse_unfit(rows_nH, scales, num_rows)
        padding_n1 = padding_rows(rows_nH, num_rows)
        ids_nk, weights_nk = ids_nk.masked_fill(padding_n1, -1), weights_nk.masked_fill(padding_n1, 0.0)
        record = Record(spec.hidden_size, rows_nH.dtype, spec.scales_a_row, spec.top_k)
        every = self.comm.all_gather(record.pack(rows_nH, scales, ids_nk, weights_nk)).flatten(0, 1)
        rows, came_scales, ids, weights = record.unpack(every, every.shape[0])
        ids = local_slots(ids, self._ep_rank, spec.slots_per_rank)
        return Dispatched(rows, came_scales, ids, weights, every.shape[0], padding_n1)

    def combine(self, returned_RH: torch.Tensor, dispatched: Dispatched) -> torch.Tensor:
        """See contract.py. Adds in rank order in float32 and rounds once, like every sum over ranks."""
        padding_n1, ranks = dispatched.context, self.comm.size
        assert isinstance(padding_n1, torch.Tensor)
        rows = padding_n1.shape[0]
        parts = self.comm.all_to_all(returned_RH, [rows] * ranks, [rows] * ranks).unflatten(0, (ranks, rows))
        return sum_in_rank_order(parts).masked_fill(padding_n1, 0)
