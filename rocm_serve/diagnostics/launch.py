"""Whether a launch can work, from configuration and headers alone: the server's arithmetic on GPUs that are not here.

Everything that the server decides (dtypes, budgets, pages, slots) is decided by the server's functions, of `config`
and `executor`. What only a GPU can tell is an estimate and is called so. No torch. Units: bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from rocm_serve.cache.layout import CACHE_ITEMSIZE
from rocm_serve.config.experts import expert_plan
from rocm_serve.config.launcher import membership
from rocm_serve.config.resolve import resolve
from rocm_serve.config.schema import Resolved, ServeConfig
from rocm_serve.diagnostics.launch_result import Concurrency, Degrees, Experts, Launch, NodeFiles, RankMemory, mesh_of
from rocm_serve.diagnostics.plan import (
    StageTable,
    Survey,
    group_of,
    legal_ep,
    legal_tp,
    plan_rank,
    stage_table,
    survey,
)
from rocm_serve.diagnostics.split import Pieces
from rocm_serve.errors import UserError
from rocm_serve.executor import budget, experts_memory, outside_memory, stage_memory, step_memory, step_rows
from rocm_serve.executor.limits import effective_limits
from rocm_serve.messages import WIRE_VERSION, EffectiveLimits, WorkerLoaded
from rocm_serve.models.qwen3_5.spec import ConfigFormats, ModelFacts, one_of_each, stage_params
from rocm_serve.parallel.expert_map import ExpertPlan
from rocm_serve.parallel.layout import Param, bytes_at, shape_at
from rocm_serve.parallel.mesh import Mesh
from rocm_serve.platform.gpus import Gpu
from rocm_serve.platform.table import laid_out

CONTEXTS = (1024, 4096, 8192, 32768, 131072)
_GPUS_A_NODE = 8
_MOST_STAGES = 16


def plan_launch(config: ServeConfig, gpu: Gpu, *, nnodes: int | None = None) -> Launch:
    """Plan `config` on nodes of `gpu`.

    `nnodes` None: eight GPUs a node, or what the stages allow. Fields of `config` that say where this process stands
    are not looked at.
    Errors: UserError for wishes that no size of GPU could meet; what does not fit is a finding, not an error.
    """
    seen = survey(config.model)
    launch = _evaluate(config, gpu, seen, nnodes)
    return launch if launch.limits is not None else replace(launch, fits_with=_advice(config, gpu, seen, launch))


def _evaluate(config: ServeConfig, gpu: Gpu, seen: Survey, nnodes: int | None) -> Launch:
    facts = seen.facts
    resolved = _resolve(config, gpu, facts, nnodes)
    mtp = resolved.draft_tokens > 0
    mesh, experts = mesh_of(resolved), expert_plan(resolved, facts)
    tables = [stage_table(seen, mesh.coord(stage * mesh.tp), mtp=mtp, experts=experts) for stage in range(mesh.pp)]
    heap = _heap(facts, experts, resolved, gpu, mtp)
    ranks = tuple(
        rank for stage, table in enumerate(tables) for rank in _ranks(facts, mesh, stage, table, resolved, gpu, heap)
    )
    pieces = _pieces(facts, mesh, tables, resolved)
    draft = _draft_bytes(facts, mesh, resolved, experts) if facts.mtp_layers and not mtp else None
    with_draft = None if draft is None else Pieces(pieces.layers, pieces.first, pieces.last + draft)
    limits, why = _limits(resolved, ranks, gpu)
    return Launch(
        facts=facts,
        source=seen.source,
        missing_files=seen.missing_files,
        gpu=gpu,
        resolved=resolved,
        mtp=mtp,
        legal=Degrees(legal_tp(facts, ep=mesh.ep), facts.num_layers, legal_ep(facts, mesh.tp)),
        experts=_experts(mesh, tables, resolved),
        pieces=pieces,
        split=pieces.even(mesh.pp),
        neutral=pieces.neutral(mesh.pp),
        neutral_with_mtp=None if with_draft is None else with_draft.neutral(mesh.pp),
        server_with_mtp=None if with_draft is None else with_draft.even(mesh.pp),
        ranks=ranks,
        nodes=tuple(_node_files(seen, mesh, tables, resolved.nnodes)),
        limits=limits,
        concurrency=() if limits is None else tuple(_concurrency(resolved, ranks, limits)),
        why=why,
    )


def _resolve(config: ServeConfig, gpu: Gpu, facts: ModelFacts, nnodes: int | None) -> Resolved:
    """Let the server decide, as on one host with all the GPUs: where the ranks meet is not part of a plan."""
    world = config.tp * config.pp
    if nnodes is None:
        nnodes = next(n for n in range(-(-world // _GPUS_A_NODE), world + 1) if world % n == 0)
    placed = msgspec.structs.replace(config, nnodes=nnodes, node_rank=0, dist_init_addr="plan:1", device=gpu.device)
    membership(placed, {})
    alone = msgspec.structs.replace(placed, nnodes=1)
    resolved = resolve(alone, facts, gpu.hosts(world), vocab_used=facts.vocab_size, run_dir="", free_port=lambda: 1)
    return msgspec.structs.replace(resolved, nnodes=nnodes)


def _heap(facts: ModelFacts, experts: ExpertPlan, resolved: Resolved, gpu: Gpu, mtp: bool) -> int:
    """Return what MORI reserves on every rank, its environment being as it asks for."""
    exchanges = experts_memory.layer_exchanges(facts, experts, resolved, mtp=mtp)
    needed = experts_memory.mori_heap_bytes(facts, exchanges, resolved, compute_units=gpu.compute_units)
    return experts_memory.reserved_heap_bytes(needed)


def _experts(mesh: Mesh, tables: Sequence[StageTable], resolved: Resolved) -> Experts | None:
    slots, extra = 0, [0] * mesh.pp
    for stage, table in enumerate(tables):
        place = mesh.coord(stage * mesh.tp).place
        for name, param in table.params.items():
            if name.endswith(".experts.down_proj"):
                slots = max(slots, shape_at(param, place)[0])
            elif ".shared_expert." in name and not any(True for _ in param.splits):
                whole = bytes_at(param, place, model_itemsize=CACHE_ITEMSIZE[resolved.dtype])
                extra[stage] += whole - whole // mesh.tp
    return Experts(slots, mesh.tp // mesh.ep, max(extra)) if slots else None


def _ranks(
    facts: ModelFacts, mesh: Mesh, stage: int, table: StageTable, resolved: Resolved, gpu: Gpu, heap: int
) -> list[RankMemory]:
    """Weigh one rank of a stage; the bands of the parameter table are equal, so the others hold as much."""
    coord = mesh.coord(stage * mesh.tp)
    itemsize = CACHE_ITEMSIZE[resolved.dtype]
    weights = plan_rank(facts, coord, table.params, model_itemsize=itemsize, stored=table.stored)
    assert weights.total_bytes == stage_memory.weight_bytes(table.params, coord, resolved)
    sums = outside_memory.summing_bytes(resolved)
    allowed = budget.gpu_memory(gpu.hbm_bytes, gpu.hbm_bytes - outside_memory.RUNTIME_BYTES - heap - sums, resolved)
    step = step_memory.step_bytes(table.params, facts, coord, resolved)
    first = RankMemory(
        weights=weights,
        allowed=allowed,
        preparing=stage_memory.preparation_bytes(table.params, coord, resolved, laid_out(gpu.arch, resolved.op)),
        step=step,
        exchange=experts_memory.step_staging(table.params, facts, resolved, step_rows.most_rows(resolved)),
        heap=heap,
        sums=sums,
        cache=allowed - weights.total_bytes - step,
        page=stage_memory.page_bytes(facts, coord, resolved),
        slot=stage_memory.slot_bytes(facts, coord, resolved),
        runtime=outside_memory.RUNTIME_BYTES,
        communicators=outside_memory.communicator_bytes(coord, resolved),
        graphs=outside_memory.graph_bytes(table.params, facts, coord, resolved),
    )
    return [
        replace(first, weights=replace(weights, rank=coord.rank + other, tp_rank=other)) for other in range(mesh.tp)
    ]


def _limits(resolved: Resolved, ranks: Sequence[RankMemory], gpu: Gpu) -> tuple[EffectiveLimits | None, str | None]:
    """Do what the server does after loading, and return its refusal as a sentence."""
    heaviest = max(ranks, key=lambda rank: rank.weights.total_bytes)
    weights = heaviest.weights.total_bytes
    if weights > gpu.hbm_bytes:
        return None, (
            f"the weights alone of rank {heaviest.weights.rank} are {budget.human(weights)}, one {gpu.name} has"
            f" {budget.human(gpu.hbm_bytes)}"
        )
    try:
        budgets = [
            WorkerLoaded(
                one.weights.rank,
                WIRE_VERSION,
                budget.bytes_for_caches(one.weights.rank, one.allowed, one.weights.total_bytes, one.step),
                one.page,
                one.slot,
            )
            for one in ranks
        ]
        limits = effective_limits(resolved, budgets)
        for one in ranks:
            budget.check_preparation(one.weights.rank, one.allowed, one.weights.total_bytes, one.preparing)
    except UserError as refusal:
        return None, str(refusal)
    outside = max(ranks, key=lambda rank: rank.outside)
    room = gpu.hbm_bytes - int(gpu.hbm_bytes * resolved.mem_fraction)
    if outside.outside > room:
        return limits, (
            f"--mem-fraction {resolved.mem_fraction:g} leaves {budget.human(room)} outside the server's budget,"
            f" and rank {outside.weights.rank} needs about {budget.human(outside.outside)} there"
            " for communicators and graphs"
        )
    return limits, None


def _concurrency(resolved: Resolved, ranks: Sequence[RankMemory], limits: EffectiveLimits) -> list[Concurrency]:
    found = []
    for length in sorted({*(c for c in CONTEXTS if c < resolved.max_model_len), resolved.max_model_len}):
        pages = -(-length // resolved.page_size)
        by_memory = min((one.cache - one.slot) // (pages * one.page + one.slot) for one in ranks)
        found.append(Concurrency(length, min(limits.num_slots, limits.num_pages // pages), max(0, by_memory)))
    return found


def _pieces(facts: ModelFacts, mesh: Mesh, tables: Sequence[StageTable], resolved: Resolved) -> Pieces:
    """Weigh every layer, and what the first and the last stage hold beside layers, on one rank."""
    layers = [0] * facts.num_layers
    beside = dict.fromkeys(("embedding", "head", "mtp"), 0)
    for stage, table in enumerate(tables):
        for name, param in table.params.items():
            size = _local(param, mesh, stage, resolved)
            if (group := group_of(name)) == "layers":
                layers[int(name.split(".")[2])] += size
            else:
                beside[group] += size
    return Pieces(tuple(layers), beside["embedding"], beside["head"] + beside["mtp"])


def _draft_bytes(facts: ModelFacts, mesh: Mesh, resolved: Resolved, experts: ExpertPlan) -> int:
    """Weigh the draft layer on a rank of the last stage; it is the same beside however many layers."""
    short = one_of_each(facts)
    stages = min(mesh.pp, 2, short.num_layers)
    last = Mesh(mesh.tp, stages, mesh.ep).coord((stages - 1) * mesh.tp)
    params = stage_params(short, last, formats=ConfigFormats(facts), mtp=True, experts=experts)
    return sum(_local(param, mesh, last.stage, resolved) for name, param in params.items() if group_of(name) == "mtp")


def _local(param: Param, mesh: Mesh, stage: int, resolved: Resolved) -> int:
    coord = mesh.coord(stage * mesh.tp)
    return bytes_at(param, coord.place, model_itemsize=CACHE_ITEMSIZE[resolved.dtype])


def _node_files(seen: Survey, mesh: Mesh, tables: Sequence[StageTable], nnodes: int) -> list[NodeFiles]:
    if seen.names is None:
        return []
    nodes = []
    for node in range(nnodes):
        files = tuple(sorted({file for stage in mesh.stages_of(node, nnodes) for file in tables[stage].files}))
        nodes.append(NodeFiles(node, files, seen.file_bytes(files)))
    return nodes


def _advice(config: ServeConfig, gpu: Gpu, seen: Survey, launch: Launch) -> str | None:
    """Name the fewest stages of the same width with which it would fit, if there are any."""
    one = launch.ranks[0]
    most = min(seen.facts.num_layers, _MOST_STAGES)
    enough = (pp for pp in range(config.pp + 1, most + 1) if launch.pieces.even(pp).heaviest + one.step < one.allowed)
    pp = next(enough, None)
    if pp is None:
        return None
    more = _evaluate(msgspec.structs.replace(config, pp=pp), gpu, seen, None)
    if not more.fits:
        return None
    ep = f" --ep {config.ep}" if config.ep > 1 else ""
    return f"--tp {config.tp} --pp {pp}{ep} fits: {more.mesh.world} x {gpu.name} on {more.resolved.nnodes} nodes"
