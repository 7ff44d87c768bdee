"""From a checkpoint directory to one rank's model: what fits, which providers, then the weights."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from rocm_serve.checkpoint.ledger import stage_catalogue
from rocm_serve.checkpoint.load import Progress, dummy_fill, load_stage
from rocm_serve.checkpoint.reader import CheckpointReader, read_config
from rocm_serve.config.experts import expert_plan
from rocm_serve.config.load import environment
from rocm_serve.config.schema import Resolved
from rocm_serve.executor import budget, outside_memory, stage_memory, step_memory
from rocm_serve.executor.binding import Wishes, check_same, fallbacks, of_called, op_facts, settle
from rocm_serve.executor.device import MODEL_DTYPES, arch_of, device_of, dialect_of
from rocm_serve.executor.experts import build_exchanges
from rocm_serve.executor.loaded_stage import LoadedStage
from rocm_serve.executor.probe_node import NodeProber, cache_folder, machine_key
from rocm_serve.models.qwen3_5.spec import ConfigFormats, ModelFacts, parse_config, stage_params
from rocm_serve.models.registry import build_model
from rocm_serve.ops.bind import BoundOps, bind_ops, binding_lines
from rocm_serve.ops.comm.choice import summing
from rocm_serve.ops.fp8 import FN, FP8_DTYPES
from rocm_serve.ops.probe_child import PRODUCT_TABLE, ops_of
from rocm_serve.parallel.board import Board, NotesOfOneProcess
from rocm_serve.parallel.comm import Comm
from rocm_serve.parallel.layout import Param
from rocm_serve.parallel.mesh import Coord
from rocm_serve.platform.probe import free_device_bytes, free_ram_bytes

log = logging.getLogger(__name__)


def load_stage_model(
    resolved: Resolved,
    coord: Coord,
    comm: Comm,
    *,
    moved: Callable[[], None] = lambda: None,
    board: Board | None = None,
    host: Comm | None = None,
    table: str = PRODUCT_TABLE,
) -> LoadedStage:
    """Build this rank's part of the model and fill it, after checking that it fits. `moved` is told of progress.

    `board`: of all ranks, where they agree on providers; needed with several. `host`: the ranks of `comm` over gloo,
    for exchanges and sums that ask for it. `table`: "module:name" of the ops.
    Errors: UserError, one line, before any big read.
    """
    device = device_of(resolved, coord)
    dtype = MODEL_DTYPES[resolved.dtype]
    comm = summing(resolved.all_reduce, comm, host, device)
    facts = parse_config(*read_config(resolved.model))
    plan = expert_plan(resolved, facts)
    _, units = arch_of(device)
    # First of all: what exchanges take of a GPU is no longer free then, and whatever is missing shows at once.
    experts = build_exchanges(facts, plan, coord, resolved, comm, host=host, compute_units=units, dtype=dtype)
    allowed, held = _allowed_and_held(resolved, device)
    reader = CheckpointReader(resolved.model) if resolved.load_format == "auto" else None
    drafts = resolved.draft_tokens > 0
    formats = ConfigFormats(facts) if reader is None else stage_catalogue(reader, facts, coord, mtp=drafts)
    params = stage_params(facts, coord, formats=formats, mtp=drafts, experts=plan)
    weights = stage_memory.weight_bytes(params, coord, resolved)
    step = step_memory.step_bytes(params, facts, coord, resolved)  # as far as wishes tell
    budget.bytes_for_caches(coord.rank, allowed, weights, step, held=held)
    ops = _bind(facts, params, coord, resolved, device, board, table, moved)
    counted = _counted(ops, device)
    step = step_memory.step_bytes(params, facts, coord, resolved, counted=counted)
    caches = budget.bytes_for_caches(coord.rank, allowed, weights, step, held=held)
    preparing = stage_memory.preparation_bytes(params, coord, resolved, ops.preparing)
    budget.check_preparation(coord.rank, allowed, weights, preparing)
    fp8 = FP8_DTYPES[dialect := dialect_of(device)]
    if fp8 is not FN and any(param.dtype == "fp8" for param in params.values()):
        log.info("rank %d: FP8 weights are turned from e4m3fn into e4m3%s as they are read", coord.rank, dialect)
    model = build_model(
        facts,
        coord,
        params,
        comm,
        ops,
        device=device,
        dtype=dtype,
        mtp=drafts,
        fp8=fp8,
        experts=experts.wiring if facts.is_moe else None,
    )
    _fill(reader, facts, coord, params, dict(model.named_parameters()), resolved.seed, moved)
    model.prepare()
    sizes = map(budget.human, (weights, step, caches))
    log.info("rank %d: weights %s, one step up to %s, %s left for caches", coord.rank, *sizes)
    held = sum(tensor.nbytes for tensor in model.state_dict().values())
    parts = (resolved, coord, facts, model, ops, comm, device, dtype, weights, held, caches, experts)
    return LoadedStage(*parts, outside_memory.graph_bytes(params, facts, coord, resolved, counted=counted))


def _counted(ops: BoundOps, device: torch.device) -> bool:
    """Whether it is known what every op that was bound holds for a step."""
    return device.type != "cpu" and step_memory.counted((line.op, line.provider) for line in ops.report)


def _bind(
    facts: ModelFacts,
    params: dict[str, Param],
    coord: Coord,
    resolved: Resolved,
    device: torch.device,
    board: Board | None,
    table: str,
    moved: Callable[[], None],
) -> BoundOps:
    """Choose providers with all other ranks, and load them. Rank 0 reports. Errors: UserError."""
    arch, units = arch_of(device)
    ops = ops_of(table)
    static = op_facts(
        facts,
        params,
        coord,
        resolved,
        arch=arch,
        compute_units=units,
        dialect=dialect_of(device),
        activation=resolved.fp8_activation,
    )
    shared = board or NotesOfOneProcess()
    prober = NodeProber(
        ops=ops,
        facts=static,
        device=str(device),
        machine=machine_key(device, arch, units),
        run_dir=Path(resolved.run_dir),
        threads=resolved.torch_threads,
        seed=resolved.seed,
        table=table,
        cache_dir=cache_folder(environment()),
        moved=moved,
    )
    each = coord.mesh.world // resolved.nnodes
    refused = settle(
        ops, Wishes(resolved.op, resolved.preferred), static, shared, tuple(range(0, coord.mesh.world, each)), prober
    )
    bound = bind_ops(
        resolved.op,
        arch,
        facts=static.mapping(),
        activation=resolved.fp8_activation,
        table=ops,
        refused=refused,
        preferred=resolved.preferred,
    )
    bound = replace(bound, report=of_called(bound.report, static))
    check_same(bound.report, bound.fp8_activation, shared, moved)
    if coord.rank == 0:
        for line in binding_lines(bound.report):
            log.info("%s", line)
        for op, why in fallbacks(bound.report, graphs=resolved.graph_max_batch > 0).items():
            log.warning("op %s %s", op, why)
    return bound


def _allowed_and_held(resolved: Resolved, device: torch.device) -> tuple[int, int]:
    """Bytes that this worker may use in all, and those of its GPU in use before it has taken any for the model."""
    if device.type == "cpu":
        return budget.cpu_memory(free_ram_bytes(), resolved), 0
    free, total = free_device_bytes(device.index)
    return budget.gpu_memory(total, free, resolved), total - free


def _fill(
    reader: CheckpointReader | None,
    facts: ModelFacts,
    coord: Coord,
    params: dict[str, Param],
    into: dict[str, torch.Tensor],
    seed: int,
    moved: Callable[[], None],
) -> None:
    assert into.keys() == params.keys(), f"model and parameter table differ: {sorted(into.keys() ^ params.keys())[:4]}"
    if reader is None:
        log.info("rank %d: --load-format dummy: made-up weights", coord.rank)
        dummy_fill(params, coord, into, seed=seed)
        return

    def progress(news: Progress) -> None:
        moved()
        log.info("rank %d: loading %s", coord.rank, news)

    with reader:
        report = load_stage(reader, facts, coord, params, into, progress)
    for line in report.lines():
        log.info("rank %d: %s", coord.rank, line)
