"""Rows go to the ranks that hold their experts by torch's all-to-all, once per rank. Any backend of Comm.

Split sizes are needed on the host, so a step that uses it cannot be captured in a graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rocm_serve.parallel.comm import Comm
from rocm_serve.parallel.exchange.contract import Dispatched, ExchangeSpec
from rocm_serve.parallel.exchange.records import Record
from rocm_serve.parallel.exchange.shares import Shares, ep_rank_of, local_slots


@dataclass(frozen=True, slots=True)
class _Sent:
    """Where the copies of this rank's rows went: `order` is the row of each, destination rank by destination rank."""

    order: torch.Tensor
    send_rows: list[int]
    receive_rows: list[int]
    rows: int  # of `rows_nH`, padding included


class TorchExchange(Shares):
    """Two calls out (how many rows, then the rows with their ids, weights and scales as bytes), one back."""

    name = "torch"
    graph_refusal: str | None = "the exchange torch has the host count the rows that each rank sends"

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
        spec, live = self.spec, int(num_rows)
        spec.refuse_unfit(rows_nH, scales, num_rows)
        ids_nk = ids_nk[:live]
        # One row in `goes` for each destination rank; choices below zero or beyond all slots name no holder.
        holders = torch.arange(spec.ep, device=ids_nk.device)
        goes = (ids_nk.div(spec.slots_per_rank, rounding_mode="floor")[None] == holders[:, None, None]).any(dim=2)
        goes = goes.repeat_interleave(self.comm.size // spec.ep, dim=0)
        counts = goes.sum(dim=1)
        ones = [1] * self.comm.size
        send_rows, receive_rows = torch.stack([counts, self.comm.all_to_all(counts, ones, ones)]).tolist()
        # Where `goes` is true, in order; nonzero() would wait for the device once more.
        order = goes.flatten().to(torch.uint8).argsort(descending=True, stable=True)[: sum(send_rows)] % max(1, live)
        record = Record(spec.hidden_size, rows_nH.dtype, spec.scales_a_row, spec.top_k)
        packed = record.pack(rows_nH[:live], None if scales is None else scales[:live], ids_nk, weights_nk[:live])
        came = self.comm.all_to_all(packed[order], send_rows, receive_rows)
        received = came.shape[0]
        rows, came_scales, ids, weights = record.unpack(came, received + -received % self.row_multiple)
        ids = local_slots(ids, self._ep_rank, spec.slots_per_rank)
        sent = _Sent(order, send_rows, receive_rows, rows_nH.shape[0])
        return Dispatched(rows, came_scales, ids, weights, received, sent)

    def combine(self, returned_RH: torch.Tensor, dispatched: Dispatched) -> torch.Tensor:
        """See contract.py. Adds in rank order in float32 and rounds once, like every sum over ranks."""
        sent = dispatched.context
        assert isinstance(sent, _Sent) and isinstance(dispatched.count, int)
        back = self.comm.all_to_all(returned_RH[: dispatched.count], sent.receive_rows, sent.send_rows)
        total = torch.zeros(sent.rows, back.shape[1], dtype=torch.float32, device=back.device)
        for rows, part in zip(sent.order.split(sent.send_rows), back.split(sent.send_rows), strict=True):
            total.index_add_(0, rows, part.float())  # a rank sends a row back once: no two terms in one call
        return total.to(back.dtype)
