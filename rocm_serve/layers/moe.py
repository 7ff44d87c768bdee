"""Mixture of experts with a shared expert.

Letters: T rows of the step, n of this rank, R that came to its experts, H width, E experts, I expert width of this
rank, k choices a row.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from rocm_serve.layers.beside import begun
from rocm_serve.layers.linear import Linear
from rocm_serve.layers.mlp import GatedMLP
from rocm_serve.layers.weights import OpWeights, Weights
from rocm_serve.ops.bind import REFERENCE, BoundOps
from rocm_serve.ops.tiles_linear import SHARED_ROWS
from rocm_serve.parallel.comm import Comm
from rocm_serve.parallel.exchange.contract import Dispatched, ExchangeSpec, ExpertExchange
from rocm_serve.parallel.exchange.local import LocalExchange
from rocm_serve.parallel.expert_map import ExpertMap, ExpertPlan

Shared = Callable[[], torch.Tensor]  # computes what the shared expert makes of a rank's own rows
_ALIGNED = 16  # numbers between whose multiples rows of a product begin: pieces of them are read 16 bytes at once
MOST_BESIDE = 64  # rows whose shared expert is worth a fork: of 256 rows a step took as long as without (H200)
End = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # from what routed experts made of a rank's rows, and these


class RoutedExperts(OpWeights):
    """The stacked weights of the routed experts: [E, 2 I, H] (gate rows, then up rows) and [E, H, I]."""

    def __init__(self, weights: Weights, ops: BoundOps) -> None:
        super().__init__()
        self.gate_up_proj = weights.make("gate_up_proj")
        self.down_proj = weights.make("down_proj")
        self.gate_up_proj_scale_inv = self._scale(weights, "gate_up_proj")
        self.down_proj_scale_inv = self._scale(weights, "down_proj")
        self.ops = ops

    @staticmethod
    def _scale(weights: Weights, name: str) -> nn.Parameter | None:
        return weights.make(f"{name}_scale_inv") if weights.is_fp8(name) else None

    def op_weights(self) -> tuple[str, Mapping[str, str]]:
        return "moe_experts", {
            "w13_EIH": "gate_up_proj",
            "w2_EHI": "down_proj",
            "w13_scale": "gate_up_proj_scale_inv",
            "w2_scale": "down_proj_scale_inv",
        }

    def forward(self, sent: Dispatched, out_dtype: torch.dtype) -> torch.Tensor:
        """Return the weighted sum over the experts here of every row that came, [R, H]."""
        return self.ops.moe_experts(
            sent.rows,
            sent.ids,
            sent.weights,
            sent.count,
            self.gate_up_proj,
            self.down_proj,
            self.gate_up_proj_scale_inv,
            self.down_proj_scale_inv,
            sent.scales,
            activation=self.ops.fp8_activation,
            out_dtype=out_dtype,
        )


class ExpertSlots(nn.Module):
    """From the expert that a row chose to a slot that holds it. Letters: P slots over all ranks, M replicas at most.

    The replica is the sum of the row's k ids, counted around: it depends on that row alone, and rows that share an
    expert use all of its replicas.
    """

    slots_EM: torch.Tensor
    replicas_E: torch.Tensor

    def __init__(self, places: ExpertMap, device: torch.device) -> None:
        super().__init__()
        slots: list[list[int]] = [[] for _ in range(max(places.experts) + 1)]
        for slot, expert in enumerate(places.experts):
            slots[expert].append(slot)
        most = max(map(len, slots))
        padded = torch.tensor([own + own[:1] * (most - len(own)) for own in slots], dtype=torch.int32, device=device)
        self.register_buffer("slots_EM", padded, persistent=False)
        replicas = torch.tensor([len(own) for own in slots], device=device)
        self.register_buffer("replicas_E", replicas, persistent=False)

    def forward(self, ids_nk: torch.Tensor) -> torch.Tensor:
        """Return int32 [n, k]: a slot over all ranks for each choice."""
        ids = ids_nk.long()
        return self.slots_EM[ids, ids.sum(dim=1, keepdim=True) % self.replicas_E[ids]]


@dataclass(frozen=True, slots=True)
class ExpertWiring:
    """Where a model's experts are and how rows come to them, layer by layer; the draft head's is DRAFT_LAYER."""

    plan: ExpertPlan
    exchanges: Mapping[int, ExpertExchange]


class SparseMoe(nn.Module):
    """Routed experts plus a gated shared expert. Router and shared gate are whole on every rank.

    One completion: where the exchange's sums are partial, those of both halves are joined before the one all-reduce;
    where they are complete, the shared expert is whole and computed for a rank's own rows, and nothing is reduced.
    Where a kernel is bound as shared_expert_add, it does the work of the shared expert's gate and of both sums, and one
    product makes the router's logits and the shared expert's gate and up. Where one is bound as shared_down_add, that
    product of some rows makes what opens the shared expert too, and the kernel does all that is left.
    `observe`, when set, is called with the experts chosen, int32 [n, k], and how many of these rows are no padding:
    on every rank with its own rows where they are scattered, else with all rows.
    """

    def __init__(
        self,
        weights: Weights,
        ops: BoundOps,
        comm: Comm,
        *,
        top_k: int,
        renormalise: bool,
        exchange: ExpertExchange | None = None,
        places: ExpertMap | None = None,
    ) -> None:
        super().__init__()
        self.gate = Linear(weights.under("gate"), ops)
        self.shared_expert_gate = Linear(weights.under("shared_expert_gate"), ops)
        self.shared_expert = GatedMLP(weights.under("shared_expert"), ops, comm)
        self.experts = RoutedExperts(weights.under("experts"), ops)
        self.slots = None if places is None or places.is_plain else ExpertSlots(places, weights.device)
        self.exchange = exchange or local_exchange(self.experts, weights, comm, top_k)
        self.ops = ops
        self.comm = comm
        self.top_k = top_k
        self.renormalise = renormalise
        self.observe: Callable[[torch.Tensor, int | torch.Tensor], None] | None = None
        fp8 = self.experts.gate_up_proj_scale_inv is not None and ops.fp8_activation == "fp8_1x128"
        by_parts = (
            ops.providers["shared_expert_add"].name == REFERENCE or self.shared_expert_gate.weight_scale_inv is not None
        )
        self._with_shared = self._with_shared_by_parts if by_parts else self._with_shared_at_once
        self._first: torch.Tensor | None = None  # the weight of one product, and its rows that many rows are given to
        self._first_of_many: torch.Tensor | None = None
        self._project = self._project_apart
        if not by_parts:
            self._join_projections()
        self.sends_fp8 = fp8 and self.exchange.scattered  # half the bytes, and the experts would quantise them anyway

    @property
    def first_weight(self) -> torch.Tensor | None:
        """Return the weight of the one product that reads the rows, where a norm may be part of it; else None."""
        return None if self.exchange.scattered else self._first

    def forward(self, x_TH: torch.Tensor, num_rows: int | torch.Tensor) -> torch.Tensor:
        """Run the first `num_rows` rows through their experts; the rest is padding."""
        exchange = self.exchange
        own_nH, live = exchange.scatter(x_TH, num_rows) if exchange.scattered else (x_TH, num_rows)
        out_nH = self._run(*self._project(own_nH), own_nH, live)
        return exchange.gather(out_nH, x_TH.shape[0], num_rows) if exchange.scattered else out_nH

    def after_first(self, made_TN: torch.Tensor, x_TH: torch.Tensor, num_rows: int | torch.Tensor) -> torch.Tensor:
        """Do what `forward` does, from the product with `first_weight` on."""
        return self._run(*self._cut(made_TN), x_TH, num_rows)

    def _run(self, logits_nE: torch.Tensor, end: End, own_nH: torch.Tensor, live: int | torch.Tensor) -> torch.Tensor:
        exchange = self.exchange
        ids_nk, weights_nk = self.ops.moe_route(logits_nE, top_k=self.top_k, renormalise=self.renormalise)
        if self.observe is not None:
            self.observe(ids_nk, live)
        rows_nH, scales = own_nH, None
        if self.sends_fp8:
            rows_nH, scales = self.ops.quantise_rows(own_nH, dtype=self.experts.gate_up_proj.dtype)
        slots_nk = ids_nk if self.slots is None else self.slots(ids_nk)
        sent = exchange.dispatch(rows_nH, scales, slots_nk, weights_nk, live)
        out_nH = end(exchange.combine(self.experts(sent, own_nH.dtype), sent), own_nH)
        return out_nH if exchange.complete else self.comm.all_reduce(out_nH)

    def _join_projections(self) -> None:
        """Make the router, the shared expert's gate and up, and its own gate where shared_down_add is bound, rows of
        one weight, where all are plain."""
        parts = [self.gate, self.shared_expert.gate_up_proj]
        down = self.shared_expert.down_proj.plain_weight
        if self.ops.providers["shared_down_add"].name != REFERENCE and down is not None:
            parts.append(self.shared_expert_gate)
        plain = [weight for part in parts if (weight := part.plain_weight) is not None]
        if len(plain) == len(parts) and len({weight.dtype for weight in plain}) == 1:
            sizes = [len(weight) for weight in plain]
            padding = -sum(sizes) % _ALIGNED if len(parts) == 3 else 0
            self._first = plain[0].new_zeros(sum(sizes) + padding, plain[0].shape[1])
            for weight, rows in zip(plain, self._first.split([*sizes, padding]), strict=False):
                weight.data = rows
            self._first_of_many = self._first[: sizes[0] + sizes[1]]
            self._project = self._project_at_once

    def _project_apart(self, x_nH: torch.Tensor) -> tuple[torch.Tensor, End]:
        """Return the router's logits, and what adds the shared expert, which is begun."""
        return self.gate(x_nH), self._adding(partial(self.shared_expert.partial, x_nH), len(x_nH))

    def _project_at_once(self, x_nH: torch.Tensor) -> tuple[torch.Tensor, End]:
        return self._cut(self.ops.linear(x_nH, self._first if len(x_nH) <= SHARED_ROWS else self._first_of_many))

    def _cut(self, made_nN: torch.Tensor) -> tuple[torch.Tensor, End]:
        """Do what `_project_apart` does, with what a product has made."""
        experts, width = len(self.gate.weight), len(self.shared_expert.gate_up_proj.weight)
        logits_nE, gate_up_nI, rest = made_nN.tensor_split((experts, experts + width), dim=1)
        if rest.shape[1]:
            return logits_nE, partial(self._down_and_add, gate_up_nI, rest[:, :1])
        return logits_nE, self._adding(partial(self.shared_expert.partial_of, gate_up_nI), len(made_nN))

    def _down_and_add(
        self, gate_up_nI: torch.Tensor, gate_n1: torch.Tensor, routed_nH: torch.Tensor, x_nH: torch.Tensor
    ) -> torch.Tensor:
        return self.ops.shared_down_add(routed_nH, gate_up_nI, gate_n1, self.shared_expert.down_proj.weight)

    def _adding(self, shared: Shared, rows: int) -> End:
        """Begin the shared expert of few rows, where there is a stream for it; return what adds its rows."""
        made = begun(shared) if rows <= MOST_BESIDE else shared
        return lambda routed_nH, x_nH: self._with_shared(routed_nH, made(), x_nH)

    def run_by_parts(self) -> None:
        """Leave shared_expert_add and the joined product alone from now on, so that each part's result can be seen."""
        self._with_shared, self._project, self._first = self._with_shared_by_parts, self._project_apart, None

    def _with_shared_by_parts(
        self, routed_nH: torch.Tensor, shared_nH: torch.Tensor, x_nH: torch.Tensor
    ) -> torch.Tensor:
        return routed_nH + self.ops.sigmoid_mul(shared_nH, self.shared_expert_gate(x_nH))

    def _with_shared_at_once(
        self, routed_nH: torch.Tensor, shared_nH: torch.Tensor, x_nH: torch.Tensor
    ) -> torch.Tensor:
        return self.ops.shared_expert_add(routed_nH, shared_nH, x_nH, self.shared_expert_gate.weight)


def local_exchange(experts: RoutedExperts, weights: Weights, comm: Comm, top_k: int) -> LocalExchange:
    """Make the exchange of a layer that was given none: every rank has all rows, and there is no limit to them."""
    slots, hidden = experts.gate_up_proj.shape[0], experts.gate_up_proj.shape[2]
    spec = ExchangeSpec("local", weights.place.ep, slots, top_k, hidden, capacity=sys.maxsize, dtype=weights.dtype)
    return LocalExchange(spec, comm)
