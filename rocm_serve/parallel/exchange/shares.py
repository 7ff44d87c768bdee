"""Which rows of a step are whose, where each rank of a stage dispatches its own. Letters as in contract.py."""

from __future__ import annotations

import torch

from rocm_serve.parallel.comm import Comm


def share_of(rows: int, num_rows: int | torch.Tensor, ranks: int) -> int:
    """Return how many consecutive rows each rank gets; the last ranks may get fewer, or none."""
    return -(-(num_rows if isinstance(num_rows, int) else rows) // ranks)


class Shares:
    """`scatter` and `gather` of every exchange that takes a rank's own rows only."""

    complete = True
    scattered = True

    def __init__(self, comm: Comm, row_multiple: int) -> None:
        self.comm = comm
        self.row_multiple = row_multiple

    def scatter(self, x_TH: torch.Tensor, num_rows: int | torch.Tensor) -> tuple[torch.Tensor, int | torch.Tensor]:
        """See contract.py."""
        share = share_of(x_TH.shape[0], num_rows, self.comm.size)
        start = self.comm.rank * share
        own = x_TH.new_zeros(share + -share % self.row_multiple, *x_TH.shape[1:])
        if not isinstance(num_rows, int):
            mine = x_TH[start : start + share]
            own[: mine.shape[0]] = mine
            return own, (num_rows - start).clamp(0, share)
        mine = x_TH[start : min(start + share, num_rows)]
        own[: mine.shape[0]] = mine
        return own, mine.shape[0]

    def gather(self, own_nH: torch.Tensor, rows: int, num_rows: int | torch.Tensor) -> torch.Tensor:
        """See contract.py."""
        share = share_of(rows, num_rows, self.comm.size)
        live = num_rows if isinstance(num_rows, int) else rows
        every_nH = self.comm.all_gather(own_nH[:share]).flatten(0, 1)
        if live == rows:
            return every_nH[:rows]
        out_TH = own_nH.new_zeros(rows, *own_nH.shape[1:])
        out_TH[:live] = every_nH[:live]
        return out_TH


def ep_rank_of(comm: Comm, ep: int) -> int:
    """Neighbouring ranks share an expert rank: each holds a slice of its experts' columns."""
    return comm.rank // (comm.size // ep)


def local_slots(ids: torch.Tensor, ep_rank: int, slots_per_rank: int) -> torch.Tensor:
    """Turn slots over all ranks into slots of one, int32; -1 for those held elsewhere."""
    local = ids - ep_rank * slots_per_rank
    return local.masked_fill((local < 0) | (local >= slots_per_rank), -1).to(torch.int32)


def padding_rows(rows_nH: torch.Tensor, num_rows: int | torch.Tensor) -> torch.Tensor:
    """Return bool [n, 1]: the row is padding. Asks the device for nothing."""
    return torch.arange(rows_nH.shape[0], device=rows_nH.device)[:, None] >= num_rows
