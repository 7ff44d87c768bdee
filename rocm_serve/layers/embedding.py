"""The vocabulary at both ends of the model. Letters: T rows, R picked rows, H width, V vocabulary, t ranks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import nn

from rocm_serve.layers.weights import OpWeights, Weights
from rocm_serve.ops.bind import BoundOps
from rocm_serve.parallel.comm import Comm


class VocabParallelEmbedding(nn.Module):
    """Each rank holds V / t rows; ids held elsewhere give zeros and one all-reduce completes the rows (exactly)."""

    def __init__(self, weights: Weights, comm: Comm) -> None:
        super().__init__()
        self.weight = weights.make("weight")
        self.comm = comm
        self.first = comm.rank * self.weight.shape[0]

    def forward(self, ids_T: torch.Tensor) -> torch.Tensor:
        if self.comm.size == 1:
            return F.embedding(ids_T, self.weight)
        local_T = ids_T - self.first
        elsewhere_T = (local_T < 0) | (local_T >= self.weight.shape[0])
        rows_TH = F.embedding(local_T.masked_fill(elsewhere_T, 0), self.weight)
        return self.comm.all_reduce(rows_TH.masked_fill(elsewhere_T[:, None], 0))


class LMHead(OpWeights):
    """Logits of this rank's V / t ids, in float32 and unrounded. No collective: the sampler reduces over ranks."""

    def __init__(self, weights: Weights, ops: BoundOps) -> None:
        super().__init__()
        self.weight = weights.make("weight")
        self.ops = ops

    def op_weights(self) -> tuple[str, Mapping[str, str]]:
        return "linear", {"weight_NK": "weight"}

    def forward(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        return self.ops.linear(hidden_RH, self.weight, out_dtype=torch.float32)
