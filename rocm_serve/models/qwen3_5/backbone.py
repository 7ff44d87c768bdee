"""The decoder of the Qwen3.5 family: hidden states in, hidden states out. Letters: T rows, H width."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from rocm_serve.layers.attention import GatedAttention
from rocm_serve.layers.embedding import VocabParallelEmbedding
from rocm_serve.layers.gated_delta_net import GatedDeltaNet
from rocm_serve.layers.mlp import GatedMLP
from rocm_serve.layers.moe import ExpertWiring, SparseMoe
from rocm_serve.layers.norm import RMSNorm
from rocm_serve.layers.rotary import RotaryTable, rotary_table
from rocm_serve.layers.weights import Weights
from rocm_serve.models.qwen3_5.spec import ModelFacts
from rocm_serve.ops.batch import ForwardBatch
from rocm_serve.ops.bind import REFERENCE, BoundOps
from rocm_serve.ops.tiles_linear import FOLDED_ROWS
from rocm_serve.parallel.comm import Comm
from rocm_serve.parallel.expert_map import DRAFT_LAYER

DRAFT_CACHE_KEY = DRAFT_LAYER


def rotary_of(facts: ModelFacts, device: torch.device) -> RotaryTable:
    """Compute the angles that every full-attention layer of a stage shares."""
    return rotary_table(
        rotary_dim=facts.rotary_dim,
        theta=facts.rope.theta,
        yarn=facts.rope.yarn,
        max_position=facts.max_position,
        device=device,
    )


class DecoderLayer(nn.Module):
    """h += mixer(norm(h)); h += mlp(norm(h)). Two sums over ranks: after the mixer and after the MLP.

    Where a kernel is bound as add_norm_linear, each sum and norm of a few rows is part of the product that reads it.
    """

    def __init__(
        self,
        facts: ModelFacts,
        weights: Weights,
        ops: BoundOps,
        comm: Comm,
        rotary: RotaryTable,
        *,
        full_attention: bool,
        cache_key: int,
        experts: ExpertWiring | None,
    ) -> None:
        super().__init__()
        eps = facts.rms_norm_eps
        self.input_layernorm = RMSNorm(weights.under("input_layernorm"), ops, eps=eps)
        self.post_attention_layernorm = RMSNorm(weights.under("post_attention_layernorm"), ops, eps=eps)
        self.full_attention = full_attention
        if full_attention:
            self.self_attn = GatedAttention(
                weights.under("self_attn"),
                ops,
                comm,
                cache_key=cache_key,
                num_heads=facts.num_heads,
                num_kv_heads=facts.num_kv_heads,
                head_dim=facts.head_dim,
                eps=eps,
                rotary=rotary,
            )
        else:
            self.linear_attn = GatedDeltaNet(
                weights.under("linear_attn"),
                ops,
                comm,
                cache_key=cache_key,
                key_heads=facts.linear_num_key_heads,
                value_heads=facts.linear_num_value_heads,
                key_dim=facts.linear_key_head_dim,
                value_dim=facts.linear_value_head_dim,
                eps=eps,
                gate_activation=facts.gate_activation,
            )
        self.mlp: SparseMoe | GatedMLP
        if facts.is_moe:
            self.mlp = SparseMoe(
                weights.under("mlp"),
                ops,
                comm,
                top_k=facts.top_k,
                renormalise=facts.renormalise_top_k,
                exchange=None if experts is None else experts.exchanges[cache_key],
                places=None if experts is None else experts.plan.of_layer(cache_key, facts.num_experts),
            )
        else:
            self.mlp = GatedMLP(weights.under("mlp"), ops, comm)
        self._most_folded = 0 if ops.providers["add_norm_linear"].name == REFERENCE else FOLDED_ROWS

    def forward(self, added_TH: torch.Tensor | None, hidden_TH: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Advance the residual stream in place; return what is still to be added to it.

        `added`: what the layer before has left to be added, or None. A norm does it on its way.
        """
        mixer = self.self_attn if self.full_attention else self.linear_attn
        if added_TH is not None and 0 < len(hidden_TH) <= self._most_folded:
            first, second = mixer.first_weight, self.mlp.first_weight
            if first is not None and second is not None:
                # a sum goes where no program still reads: to other memory, and back
                total_TH = torch.empty_like(hidden_TH)
                made_TN, _ = self.input_layernorm.add_into(added_TH, hidden_TH, first, total_TH)
                mixed_TH = mixer.after_first(made_TN, batch)
                made_TN, normed_TH = self.post_attention_layernorm.add_into(mixed_TH, total_TH, second, hidden_TH)
                return self.mlp.after_first(made_TN, normed_TH, batch.rows_of_requests)
        normed_TH = normed(self.input_layernorm, added_TH, hidden_TH)
        normed_TH = self.post_attention_layernorm.add(mixer(normed_TH, batch), hidden_TH)
        return self.mlp(normed_TH, batch.rows_of_requests)


def normed(norm: RMSNorm, added_TH: torch.Tensor | None, hidden_TH: torch.Tensor) -> torch.Tensor:
    """Return the norm of the residual stream after adding to it, in place, what is left to be added."""
    return norm(hidden_TH) if added_TH is None else norm.add(added_TH, hidden_TH)


class Qwen3_5Model(nn.Module):
    """The layers of one pipeline stage, with the embedding on the first and the final norm on the last.

    Layers are MoE or dense as the model's facts say. With `is_nextn` it is the draft head's decoder: one
    full-attention layer with its own cache, always normed at the end, embedding of its own only when the table has
    one. Module names are those of the parameter table below `weights`. `experts`: None for all of them on every rank,
    or cut over tensor parallelism alone.
    """

    def __init__(
        self,
        facts: ModelFacts,
        layers: Sequence[int],
        weights: Weights,
        ops: BoundOps,
        comm: Comm,
        *,
        is_nextn: bool = False,
        experts: ExpertWiring | None = None,
    ) -> None:
        super().__init__()
        self.num_layers = 1 if is_nextn else facts.num_layers
        self.embed_tokens: VocabParallelEmbedding | None = None
        if weights.has("embed_tokens.weight"):
            self.embed_tokens = VocabParallelEmbedding(weights.under("embed_tokens"), comm)
        self.rotary = rotary_of(facts, weights.device)
        self.layers = nn.ModuleDict(
            {
                str(i): DecoderLayer(
                    facts,
                    weights.under(f"layers.{i}"),
                    ops if is_nextn else ops.for_layer(i),
                    comm,
                    self.rotary,
                    full_attention=is_nextn or facts.layer_types[i] == "full_attention",
                    cache_key=DRAFT_CACHE_KEY if is_nextn else i,
                    experts=experts,
                )
                for i in layers
            }
        )
        self.norm: RMSNorm | None = None
        if weights.has("norm.weight"):
            self.norm = RMSNorm(weights.under("norm"), ops, eps=facts.rms_norm_eps)
        self._captures: list[tuple[frozenset[int], dict[int, torch.Tensor]]] = []

    def forward(self, batch: ForwardBatch, hidden_TH: torch.Tensor | None) -> torch.Tensor:
        """Return the residual stream after this stage's layers, normed on the last stage.

        Shapes: hidden [T, H], None where this stage embeds the tokens itself -> [T, H]. `hidden` is not changed.
        """
        if hidden_TH is None:
            assert self.embed_tokens is not None, "this stage has no embedding: it needs the previous stage's rows"
            hidden_TH = self.embed_tokens(batch.token_ids_T)
        else:
            hidden_TH = hidden_TH.clone()
        added_TH = None
        for name, layer in self.layers.items():
            added_TH = layer(added_TH, hidden_TH, batch)
            for wanted, captured in self._captures:
                if int(name) in wanted:
                    captured[int(name)] = hidden_TH + added_TH
        if self.norm is not None:
            return normed(self.norm, added_TH, hidden_TH)
        return hidden_TH if added_TH is None else hidden_TH.add_(added_TH)

    @contextmanager
    def capture_hidden(self, layers: Sequence[int]) -> Iterator[Mapping[int, torch.Tensor]]:
        """Keep the residual stream after these layers of every forward inside the block.

        Yields a mapping from layer to [T, H] that holds the last forward's rows. Layers of other stages stay out of
        it. Errors: ValueError for a layer that the model does not have.
        """
        foreign = [i for i in layers if not 0 <= i < self.num_layers]
        if foreign:
            raise ValueError(f"layers {foreign} cannot be captured; legal: 0..{self.num_layers - 1}")
        captured: dict[int, torch.Tensor] = {}
        entry = (frozenset(layers), captured)
        self._captures.append(entry)
        try:
            yield captured
        finally:
            self._captures.remove(entry)


class Qwen3_5MoeModel(Qwen3_5Model):
    """The decoder whose every layer is a mixture of experts."""

    def __init__(
        self,
        facts: ModelFacts,
        layers: Sequence[int],
        weights: Weights,
        ops: BoundOps,
        comm: Comm,
        *,
        experts: ExpertWiring | None = None,
    ) -> None:
        assert facts.is_moe, f"{facts.architecture} is dense"
        super().__init__(facts, layers, weights, ops, comm, experts=experts)
