"""From count files to a placement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rocm_serve.config.experts import moe_shape
from rocm_serve.diagnostics.experts.counts import Counts, read_counts
from rocm_serve.diagnostics.experts.planner import LayerPlan, check_redundant, plan_layer
from rocm_serve.diagnostics.experts.show import Planned
from rocm_serve.diagnostics.plan import survey
from rocm_serve.errors import UserError
from rocm_serve.models.qwen3_5.spec import ConfigFormats, ModelFacts, one_of_each, stage_layers, stage_params
from rocm_serve.parallel.expert_map import DRAFT_LAYER, ExpertMap, ExpertPlan
from rocm_serve.parallel.expert_placement import FORMAT, Placement
from rocm_serve.parallel.layout import bytes_at
from rocm_serve.parallel.mesh import Mesh

_BF16 = 2


def plan_experts(
    files: Sequence[Path],
    ep: int,
    redundant: int,
    *,
    model: Path | None = None,
    tp: int | None = None,
    pp: int | None = None,
) -> Planned:
    """Place the experts of every layer that was counted.

    `tp`, `pp`: of the launch whose memory is asked for; None: of the one that was counted.
    Errors: UserError for files or degrees that will not do, or of another model than `model`.
    """
    counts = read_counts(files)
    check_redundant(counts.model.num_experts, ep, redundant)
    layers = {layer: plan_layer(count.chosen, ep, redundant) for layer, count in counts.layers.items()}
    if model is None:
        return Planned(counts, ep, redundant, layers)
    facts = survey(model).facts
    if moe_shape(facts) != counts.model:
        raise UserError(f"--model {model} is {moe_shape(facts)}; the counts are of {counts.model}")
    mesh = _mesh(counts, ep, tp, pp)
    layout = f"--tp {mesh.tp} --ep {ep} --pp {mesh.pp}, by the configuration"
    return Planned(counts, ep, redundant, layers, extra_bytes(facts, layers, mesh), layout)


def placement_of(planned: Planned) -> Placement:
    """Make the file's content: layers that are best in order are not named."""
    plain = tuple(range(planned.counts.model.num_experts))
    return Placement(
        format=FORMAT,
        version=1,
        model=planned.counts.model,
        ep=planned.ep,
        layers={layer: plan.slots for layer, plan in planned.layers.items() if plan.slots != plain},
    )


def extra_bytes(facts: ModelFacts, layers: Mapping[int, LayerPlan], mesh: Mesh) -> int:
    """Return the bytes of copies on a GPU of the stage that has most, in bf16 where weights are not FP8."""
    main, draft = _slot_bytes(facts, next(iter(layers.values())).slots, mesh)
    most = 0
    for stage in range(mesh.pp):
        coord = mesh.coord(mesh.tp_group(stage)[0])
        own = [layers[layer].copies for layer in stage_layers(facts, coord) if layer in layers]
        extra = sum(own) * main
        if coord.last_stage and DRAFT_LAYER in layers:
            extra += layers[DRAFT_LAYER].copies * draft
        most = max(most, extra // mesh.ep)
    return most


def _slot_bytes(facts: ModelFacts, slots: tuple[int, ...], mesh: Mesh) -> tuple[int, int]:
    """Return what one slot takes of a rank, in the layers and in the draft layer. One layer speaks for all."""
    short = one_of_each(facts)
    places = ExpertMap(slots, mesh.ep)
    plan = ExpertPlan(ep=mesh.ep, maps=dict.fromkeys((DRAFT_LAYER, *range(short.num_layers)), places))
    coord = Mesh(mesh.tp, 1, mesh.ep).coord(0)
    mtp = facts.mtp_layers > 0
    params = stage_params(short, coord, formats=ConfigFormats(facts), mtp=mtp, experts=plan)
    held = {
        prefix: sum(
            bytes_at(param, coord.place, model_itemsize=_BF16)
            for name, param in params.items()
            if name.startswith(f"{prefix}.layers.0.mlp.experts.")
        )
        for prefix in ("model", "mtp")
    }
    return held["model"] // places.slots_per_rank, held["mtp"] // places.slots_per_rank


def _mesh(counts: Counts, ep: int, tp: int | None, pp: int | None) -> Mesh:
    """The layout asked for, else the one that was counted, with as many tensor-parallel ranks as --ep needs."""
    ranks = tp or (counts.tp if counts.tp % ep == 0 else ep)
    stages = pp or counts.pp
    if ranks < 1 or ranks % ep or not 1 <= stages <= counts.model.num_layers:
        raise UserError(
            f"--tp {ranks} --pp {stages}: legal: --tp a multiple of --ep {ep}, --pp 1..{counts.model.num_layers}"
        )
    return Mesh(ranks, stages, ep)
