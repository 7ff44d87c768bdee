"""Decoder plus head, as text-only checkpoints hold them.

Letters: T rows, R picked rows, H width, V vocabulary, t ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import nn

from rocm_serve.layers.embedding import LMHead
from rocm_serve.layers.moe import ExpertWiring
from rocm_serve.layers.weights import OpWeights, Weights
from rocm_serve.models.qwen3_5.backbone import Qwen3_5Model, Qwen3_5MoeModel
from rocm_serve.models.qwen3_5.mtp import Qwen3_5ForCausalLMMTP
from rocm_serve.models.qwen3_5.spec import ModelFacts
from rocm_serve.ops.batch import ForwardBatch
from rocm_serve.ops.bind import BoundOps
from rocm_serve.parallel.comm import Comm


class Qwen3_5ForCausalLM(nn.Module):
    """One stage of the model: its layers, and on the last stage the head and, when asked for, the draft head."""

    backbone: type[Qwen3_5Model] = Qwen3_5Model

    def __init__(
        self,
        facts: ModelFacts,
        layers: Sequence[int],
        weights: Weights,
        ops: BoundOps,
        comm: Comm,
        *,
        mtp: bool,
        experts: ExpertWiring | None = None,
    ) -> None:
        super().__init__()
        self.model = self.backbone(facts, layers, weights.under("model"), ops, comm, experts=experts)
        self.lm_head: LMHead | None = None
        if weights.has("lm_head.weight"):
            self.lm_head = LMHead(weights.under("lm_head"), ops)
        self.mtp: Qwen3_5ForCausalLMMTP | None = None
        if mtp and self.lm_head is not None:
            embed = self.model.embed_tokens
            self.mtp = Qwen3_5ForCausalLMMTP(
                facts,
                weights.under("mtp"),
                ops,
                comm,
                embed=None if embed is None else embed.forward,
                head=self.lm_head.forward,
                experts=experts,
            )

    def forward(self, batch: ForwardBatch, hidden_TH: torch.Tensor | None) -> torch.Tensor:
        """Return the residual stream after this stage; after the last stage it is normed."""
        return self.model(batch, hidden_TH)

    def logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        """Return float32 logits [R, V / t] of this rank's ids. Last stage only."""
        assert self.lm_head is not None, "this stage has no head"
        return self.lm_head(hidden_RH)

    def capture_hidden(self, layers: Sequence[int]) -> AbstractContextManager[Mapping[int, torch.Tensor]]:
        """Keep the residual stream after these layers; see Qwen3_5Model.capture_hidden."""
        return self.model.capture_hidden(layers)

    def prepare(self) -> None:
        """Lay loaded weights out as the bound ops read them, layer by layer. The reference reads them as they are."""
        self.eval()
        for module in self.modules():
            if isinstance(module, OpWeights):
                module.prepare()


class Qwen3_5MoeForCausalLM(Qwen3_5ForCausalLM):
    """The mixture-of-experts model, built straight from a text-only checkpoint."""

    backbone = Qwen3_5MoeModel
