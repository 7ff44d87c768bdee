"""The draft head (multi-token prediction). Letters: T rows, R picked rows, H width, V vocabulary, t ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from rocm_serve.layers.linear import Linear
from rocm_serve.layers.moe import ExpertWiring
from rocm_serve.layers.norm import RMSNorm
from rocm_serve.layers.weights import Weights
from rocm_serve.models.qwen3_5.backbone import Qwen3_5Model
from rocm_serve.models.qwen3_5.spec import ModelFacts
from rocm_serve.ops.batch import ForwardBatch
from rocm_serve.ops.bind import BoundOps
from rocm_serve.parallel.comm import Comm


class Qwen3_5ForCausalLMMTP(nn.Module):
    """Predicts token t + 2 from the main model's hidden state at t and token t + 1.

    `embed` and `head` are the main model's; where this stage has no main embedding, the table holds a copy for the
    draft head and `embed` is None. Names below `mtp.` are flat, so the decoder's children are registered here.
    """

    def __init__(
        self,
        facts: ModelFacts,
        weights: Weights,
        ops: BoundOps,
        comm: Comm,
        *,
        embed: Callable[[torch.Tensor], torch.Tensor] | None,
        head: Callable[[torch.Tensor], torch.Tensor],
        experts: ExpertWiring | None = None,
    ) -> None:
        super().__init__()
        eps = facts.rms_norm_eps
        self.fc = Linear(weights.under("fc"), ops)
        self.pre_fc_norm_embedding = RMSNorm(weights.under("pre_fc_norm_embedding"), ops, eps=eps)
        self.pre_fc_norm_hidden = RMSNorm(weights.under("pre_fc_norm_hidden"), ops, eps=eps)
        decoder = Qwen3_5Model(facts, range(facts.mtp_layers), weights, ops, comm, is_nextn=True, experts=experts)
        self.layers, self.norm, self.embed_tokens = decoder.layers, decoder.norm, decoder.embed_tokens
        self._decoder = (decoder,)
        own = decoder.embed_tokens
        assert (own is None) != (embed is None), "exactly one embedding: the main model's or an own copy"
        self._embed = embed if own is None else own.forward  # not the module: it is held by one name
        self._head = head

    @property
    def model(self) -> Qwen3_5Model:
        """Return the decoder: one full-attention layer and the final norm."""
        return self._decoder[0]

    def forward(self, batch: ForwardBatch, hidden_TH: torch.Tensor) -> torch.Tensor:
        """Return the draft hidden states, normed: input of the head and of the next draft step.

        Shapes: hidden [T, H] -> [T, H]. Row t of the batch carries token t + 1 and position t; `hidden` is the main
        model's output at t, after its final norm (feeding it before the norm halves acceptance).
        """
        assert self._embed is not None
        embedded_TH = self.pre_fc_norm_embedding(self._embed(batch.token_ids_T))
        joined = torch.cat((embedded_TH, self.pre_fc_norm_hidden(hidden_TH)), dim=-1)
        return self.model.forward(batch, self.fc(joined))

    def logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        """Return float32 logits [R, V / t] of this rank's ids."""
        return self._head(hidden_RH)
