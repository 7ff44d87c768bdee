"""The sum over the ranks of one host by AITER, alone or with the norm that follows it. Letters: T rows, H width."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from aiter.dist.device_communicators.custom_all_reduce import CustomAllreduce

from rocm_serve.errors import UserError
from rocm_serve.ops.comm import AITER_MAX_BYTES
from rocm_serve.ops.comm.reference import all_reduce_add_rms_norm as composed
from rocm_serve.parallel.comm import Comm

_MAX_FUSED_WIDTH = 16384
_UNFUSED_SIZES = (6,)  # numbers of ranks without a fused kernel
_ONE_STAGE_KIB = {2: 4096, 4: 160}  # by number of ranks; below it each rank reads every peer's whole tensor
_ONE_STAGE_KIB_ELSE = 80


class AiterComm:
    """A Comm for ranks that are GPUs of one host: AITER sums what is small, `inner` does everything else.

    `group` is a gloo group of the same ranks, over which AITER exchanges memory handles when it is made. Under graph
    capture the graph is recorded inside `capture()`; there, runs before the recording return zeros for sums.
    Errors: UserError when AITER does not serve this number of ranks, or these GPUs.
    """

    graph_refusal: str | None = "AITER's all-reduce shares the buffers of a graph while it is captured"

    def __init__(
        self, inner: Comm, group: dist.ProcessGroup, device: torch.device, *, max_bytes: int = AITER_MAX_BYTES
    ) -> None:
        self._inner = inner
        self.rank = inner.rank
        self.size = inner.size
        self._max_bytes = max_bytes
        self._custom = CustomAllreduce(group=group, device=device, max_size=max_bytes)
        if self._custom.disabled:
            raise UserError(
                f"all_reduce by aiter: AITER has no custom all-reduce for {self.size} of these GPUs"
                " (2, 4, 6 or 8, linked to each other, on one host)"
            )
        self.capture = self._custom.capture

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        total = self._custom.custom_all_reduce(input=x.contiguous()) if self._small(x) else None
        return self._inner.all_reduce(x) if total is None else total

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return self._inner.all_gather(x)

    def all_to_all(self, x: torch.Tensor, send_rows: Sequence[int], receive_rows: Sequence[int]) -> torch.Tensor:
        return self._inner.all_to_all(x, send_rows, receive_rows)

    def all_reduce_add_rms_norm(
        self, x_TH: torch.Tensor, residual_TH: torch.Tensor, weight_H: torch.Tensor, *, eps: float, plus_one: bool
    ) -> torch.Tensor:
        """Sum over ranks, add to the residual stream in place and return the norm of that; see the reference."""
        assert x_TH.dtype == residual_TH.dtype == weight_H.dtype, "AITER reads all of them as the rows' dtype"
        fused = None
        if self._small(x_TH) and x_TH.shape[-1] <= _MAX_FUSED_WIDTH and self.size not in _UNFUSED_SIZES:
            fused = self._custom.custom_fused_ar_rms(
                input=x_TH.contiguous(),
                residual_inp=residual_TH.contiguous(),
                weight=weight_H,
                eps=eps,
                use_1stage=x_TH.nbytes < _ONE_STAGE_KIB.get(self.size, _ONE_STAGE_KIB_ELSE) * 1024,
                gemma_norm=plus_one,
            )
        if fused is None:
            return composed(self, x_TH, residual_TH, weight_H, eps=eps, plus_one=plus_one)
        out_TH, sum_TH = fused
        residual_TH.copy_(sum_TH)
        return out_TH

    def _small(self, x: torch.Tensor) -> bool:
        """AITER compares with a limit of its own, which may be larger than the buffers that it was given."""
        return 0 < x.nbytes <= self._max_bytes
