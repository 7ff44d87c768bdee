"""Which class runs an architecture, and the one way to build a stage of it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from rocm_serve.errors import UserError
from rocm_serve.layers.moe import ExpertWiring
from rocm_serve.layers.weights import FP8, Weights
from rocm_serve.models.qwen3_5.causal_lm import Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM
from rocm_serve.models.qwen3_5.conditional import Qwen3_5ForConditionalGeneration, Qwen3_5MoeForConditionalGeneration
from rocm_serve.models.qwen3_5.spec import ModelFacts, stage_layers
from rocm_serve.ops.bind import BoundOps
from rocm_serve.parallel.comm import Comm
from rocm_serve.parallel.layout import Param
from rocm_serve.parallel.mesh import Coord

_CLASSES = (
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeForConditionalGeneration,
)
MODELS: Mapping[str, type[Qwen3_5ForCausalLM]] = MappingProxyType({c.__name__: c for c in _CLASSES})


def build_model(
    facts: ModelFacts,
    coord: Coord,
    params: Mapping[str, Param],
    tp_comm: Comm,
    ops: BoundOps,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    mtp: bool,
    fp8: torch.dtype = FP8,
    experts: ExpertWiring | None = None,
) -> Qwen3_5ForCausalLM:
    """Build one rank's share of one stage, with uninitialised parameters named as in `params`.

    `fp8`: the dialect of the device. `experts`: where they are and how rows come to them, with the draft's layer.
    Errors: UserError for an architecture that no class runs.
    """
    if facts.architecture not in MODELS:
        raise UserError(f"{facts.architecture} is not supported; architectures are {', '.join(MODELS)}")
    assert (tp_comm.size, tp_comm.rank) == (coord.mesh.tp, coord.tp_rank), "the group is not this rank's"
    weights = Weights(params, coord.place, dtype, torch.device(device), fp8=fp8)
    model = MODELS[facts.architecture](
        facts, stage_layers(facts, coord), weights, ops, tp_comm, mtp=mtp, experts=experts
    )
    built = {name for name, _ in model.named_parameters()}
    assert built == params.keys(), f"not in both model and table: {sorted(built ^ params.keys())[:5]}"
    return model
