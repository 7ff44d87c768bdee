"""The exchanges of a model's MoE layers, built on every rank alike before anything big is read."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from rocm_serve.config.load import environment
from rocm_serve.config.schema import Resolved
from rocm_serve.executor import step_rows
from rocm_serve.executor.experts_memory import layer_exchanges
from rocm_serve.layers.moe import ExpertWiring
from rocm_serve.models.qwen3_5.spec import ModelFacts
from rocm_serve.parallel.comm import Comm
from rocm_serve.parallel.exchange.contract import ExchangeSpec
from rocm_serve.parallel.exchange.make import Exchanges
from rocm_serve.parallel.exchange.mori import MoriSetup
from rocm_serve.parallel.expert_map import ExpertPlan
from rocm_serve.parallel.mesh import Coord

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StageExperts:
    """How experts lie and how rows come to them, as this rank's model is built with. `close` at the end."""

    wiring: ExpertWiring  # of the whole model's layers
    built: Exchanges

    def close(self) -> None:
        """Every rank calls it, when no step will follow."""
        self.built.close()


def layer_specs(facts: ModelFacts, plan: ExpertPlan, resolved: Resolved, dtype: torch.dtype) -> dict[int, ExchangeSpec]:
    """Say what each layer of the whole model asks of its exchange: the same on every rank of every stage.

    The ledger has held the checkpoint against what the configuration promises of the experts' precision.
    """
    asked = layer_exchanges(facts, plan, resolved, mtp=resolved.draft_tokens > 0)
    return {
        layer: ExchangeSpec(
            name=one.name,
            ep=plan.ep,
            slots_per_rank=one.slots_per_rank,
            top_k=facts.top_k,
            hidden_size=facts.hidden_size,
            capacity=one.capacity,
            dtype=dtype,
            fp8_rows=one.fp8_rows,
        )
        for layer, one in asked.items()
    }


def build_exchanges(
    facts: ModelFacts,
    plan: ExpertPlan,
    coord: Coord,
    resolved: Resolved,
    comm: Comm,
    *,
    host: Comm | None,
    compute_units: int,
    dtype: torch.dtype,
) -> StageExperts:
    """Build them in the order of layers, and log a line for each kind.

    `host`: the ranks of `comm` over gloo; None: `comm` is that. `compute_units` of this rank's GPU, 0 on a CPU.
    Errors: UserError where a library is missing or too old.
    """
    specs = layer_specs(facts, plan, resolved, dtype)
    mori = MoriSetup(
        host=host or comm,
        gpus_per_node=coord.mesh.world // resolved.nnodes,
        compute_units=max(1, compute_units),
        environ=environment(),
    )
    built = Exchanges(specs.values(), comm, row_multiple=step_rows.row_multiple(resolved), mori=mori)
    for spec in dict.fromkeys(specs.values()):
        log.info("rank %d: %s", coord.rank, spec.describe(comm.size))
    return StageExperts(ExpertWiring(plan, {layer: built.of(spec) for layer, spec in specs.items()}), built)
