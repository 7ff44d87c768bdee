"""Whether a launch can work, from configuration and headers alone: the server's arithmetic on GPUs that are not here.

Everything that the server decides (dtypes, budgets, pages, slots) is decided by the server's functions: `resolve`,
`executor.memory`. What only a GPU can tell is an estimate and is called so. No torch. Units: bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from rocm_serve.cache.layout import CACHE_ITEMSIZE
from rocm_serve.config.launcher import membership
from rocm_serve.config.resolve import resolve
from rocm_serve.config.schema import Resolved, ServeConfig
from rocm_serve.diagnostics.plan import RankPlan, StageTable, Survey, group_of, legal_tp, plan_rank, stage_table, survey
from rocm_serve.diagnostics.split import Pieces, Split
from rocm_serve.errors import UserError
from rocm_serve.executor import memory
from rocm_serve.messages import WIRE_VERSION, EffectiveLimits, WorkerLoaded
from rocm_serve.models.qwen3_5.spec import ConfigFormats, ModelFacts, one_of_each, stage_params
from rocm_serve.parallel.layout import Axis, Param, local_bytes
from rocm_serve.parallel.mesh import Mesh
from rocm_serve.platform.gpus import Gpu

CONTEXTS = (1024, 4096, 8192, 32768, 131072)
_GPUS_A_NODE = 8
_MOST_STAGES = 16


@dataclass(frozen=True, slots=True)
class RankMemory:
    """One rank's GPU. `allowed` is the server's budget (--mem-fraction); estimates lie outside of it."""

    weights: RankPlan
    allowed: int
    step: int
    cache: int  # left of the budget for pages and slots; negative when there is nothing left
    page: int
    slot: int
    runtime: int  # estimate
    communicators: int  # estimate
    graphs: int  # estimate

    @property
    def outside(self) -> int:
        return self.communicators + self.graphs


@dataclass(frozen=True, slots=True)
class NodeFiles:
    """Checkpoint files that one node's ranks read. `nbytes` None: not all of them are here to be measured."""

    node: int
    files: tuple[str, ...]
    nbytes: int | None


@dataclass(frozen=True, slots=True)
class Concurrency:
    """Requests of `length` tokens that are computed at once with these flags, and that memory alone would allow."""

    length: int
    at_once: int
    by_memory: int


@dataclass(frozen=True, slots=True)
class Degrees:
    """What the model allows: `ep` within a stage, `pp` from 1 up to that number."""

    tp: tuple[int, ...]
    pp: int
    ep: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Launch:
    """The whole plan. `limits` is what the server would come to, if it starts; `why` says what is in the way."""

    facts: ModelFacts
    source: str
    missing_files: tuple[str, ...]
    gpu: Gpu
    resolved: Resolved
    mtp: bool
    legal: Degrees
    pieces: Pieces
    split: Split  # the server's
    neutral: Split
    neutral_with_mtp: Split | None  # None: the model has no draft layer
    server_with_mtp: Split | None
    ranks: tuple[RankMemory, ...]
    nodes: tuple[NodeFiles, ...]
    limits: EffectiveLimits | None
    concurrency: tuple[Concurrency, ...]
    why: str | None
    fits_with: str | None = None

    @property
    def fits(self) -> bool:
        return self.why is None

    @property
    def mesh(self) -> Mesh:
        return Mesh(self.resolved.tp, self.resolved.pp)


def plan_launch(config: ServeConfig, gpu: Gpu, *, nnodes: int | None = None, mtp: bool = False) -> Launch:
    """Plan `config` on nodes of `gpu`.

    `nnodes` None: eight GPUs a node, or what the stages allow. `mtp`: as if the draft layer were loaded, which the
    server does not do yet. Fields of `config` that say where this process stands are not looked at.
    Errors: UserError for wishes that no size of GPU could meet; what does not fit is a finding, not an error.
    """
    seen = survey(config.model)
    if mtp and not seen.facts.mtp_layers:
        raise UserError("--mtp: the model has no draft layer (mtp_num_hidden_layers is 0)")
    launch = _evaluate(config, gpu, seen, nnodes, mtp)
    return launch if launch.limits is not None else replace(launch, fits_with=_advice(config, gpu, seen, launch))


def _evaluate(config: ServeConfig, gpu: Gpu, seen: Survey, nnodes: int | None, mtp: bool) -> Launch:
    facts = seen.facts
    resolved = _resolve(config, gpu, facts, nnodes)
    mesh = Mesh(resolved.tp, resolved.pp)
    tables = [stage_table(seen, mesh.coord(stage * mesh.tp), mtp=mtp) for stage in range(mesh.pp)]
    ranks = tuple(
        rank for stage, table in enumerate(tables) for rank in _ranks(facts, mesh, stage, table, resolved, gpu)
    )
    pieces = _pieces(facts, mesh, tables, resolved)
    draft = _draft_bytes(facts, mesh, resolved) if facts.mtp_layers and not mtp else None
    with_draft = None if draft is None else Pieces(pieces.layers, pieces.first, pieces.last + draft)
    limits, why = _limits(resolved, ranks, gpu)
    return Launch(
        facts=facts,
        source=seen.source,
        missing_files=seen.missing_files,
        gpu=gpu,
        resolved=resolved,
        mtp=mtp,
        legal=Degrees(legal_tp(facts), facts.num_layers, legal_tp(facts, axis=Axis.EP) if facts.num_experts else (1,)),
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


def _ranks(
    facts: ModelFacts, mesh: Mesh, stage: int, table: StageTable, resolved: Resolved, gpu: Gpu
) -> list[RankMemory]:
    """Weigh one rank of a stage; the bands of the parameter table are equal, so the others hold as much."""
    coord = mesh.coord(stage * mesh.tp)
    itemsize = CACHE_ITEMSIZE[resolved.dtype]
    weights = plan_rank(facts, coord, table.params, model_itemsize=itemsize, stored=table.stored)
    assert weights.total_bytes == memory.weight_bytes(table.params, coord, resolved)
    allowed = memory.gpu_memory(gpu.hbm_bytes, gpu.hbm_bytes - memory.RUNTIME_BYTES, resolved)
    step = memory.step_bytes(table.params, facts, coord, resolved)
    first = RankMemory(
        weights=weights,
        allowed=allowed,
        step=step,
        cache=allowed - weights.total_bytes - step,
        page=memory.page_bytes(facts, coord, resolved),
        slot=memory.slot_bytes(facts, coord, resolved),
        runtime=memory.RUNTIME_BYTES,
        communicators=memory.communicator_bytes(coord, resolved),
        graphs=memory.graph_bytes(table.params, facts, coord, resolved),
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
            f"the weights alone of rank {heaviest.weights.rank} are {memory.human(weights)}, one {gpu.name} has"
            f" {memory.human(gpu.hbm_bytes)}"
        )
    try:
        budgets = [
            WorkerLoaded(
                one.weights.rank,
                WIRE_VERSION,
                memory.bytes_for_caches(one.weights.rank, one.allowed, one.weights.total_bytes, one.step),
                one.page,
                one.slot,
            )
            for one in ranks
        ]
        limits = memory.effective_limits(resolved, budgets)
    except UserError as refusal:
        return None, str(refusal)
    outside = max(ranks, key=lambda rank: rank.outside)
    room = gpu.hbm_bytes - int(gpu.hbm_bytes * resolved.mem_fraction)
    if outside.outside > room:
        return limits, (
            f"--mem-fraction {resolved.mem_fraction:g} leaves {memory.human(room)} outside the server's budget,"
            f" and rank {outside.weights.rank} needs about {memory.human(outside.outside)} there"
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


def _draft_bytes(facts: ModelFacts, mesh: Mesh, resolved: Resolved) -> int:
    """Weigh the draft layer on a rank of the last stage; it is the same beside however many layers."""
    short = one_of_each(facts)
    stages = min(mesh.pp, 2, short.num_layers)
    last = Mesh(mesh.tp, stages).coord((stages - 1) * mesh.tp)
    params = stage_params(short, last, formats=ConfigFormats(facts), mtp=True)
    return sum(_local(param, mesh, last.stage, resolved) for name, param in params.items() if group_of(name) == "mtp")


def _local(param: Param, mesh: Mesh, stage: int, resolved: Resolved) -> int:
    coord = mesh.coord(stage * mesh.tp)
    return local_bytes(param, mesh.tp, coord.tp_rank, model_itemsize=CACHE_ITEMSIZE[resolved.dtype])


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
    more = _evaluate(msgspec.structs.replace(config, pp=pp), gpu, seen, None, launch.mtp)
    if not more.fits:
        return None
    return f"--tp {config.tp} --pp {pp} fits: {more.mesh.world} x {gpu.name} on {more.resolved.nnodes} nodes"
