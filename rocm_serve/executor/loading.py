"""From a checkpoint directory to one rank's model, and from the model to a runner."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from rocm_serve.cache.allocate import KV_DTYPES, allocate_stage_cache, cache_bytes
from rocm_serve.checkpoint.ledger import stage_catalogue
from rocm_serve.checkpoint.load import Progress, dummy_fill, load_stage
from rocm_serve.checkpoint.reader import CheckpointReader, read_config
from rocm_serve.config.schema import Resolved
from rocm_serve.executor import memory
from rocm_serve.executor.inputs import RequestTable
from rocm_serve.executor.runner import StageModel, StageRunner
from rocm_serve.executor.sampler import Sampler
from rocm_serve.models.qwen3_5.spec import ConfigFormats, ModelFacts, parse_config, stage_params
from rocm_serve.models.registry import build_model
from rocm_serve.ops.batch import StageCache
from rocm_serve.ops.bind import bind_ops, binding_lines
from rocm_serve.parallel.comm import Comm
from rocm_serve.parallel.layout import Param
from rocm_serve.parallel.mesh import Coord
from rocm_serve.platform.probe import free_device_bytes, free_ram_bytes, gpus_seen_by_torch

log = logging.getLogger(__name__)

MODEL_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class LoadedStage:
    """One rank with its weights in place; caches come once every rank has said what it can afford."""

    resolved: Resolved
    coord: Coord
    facts: ModelFacts
    model: StageModel
    comm: Comm
    device: torch.device
    dtype: torch.dtype
    weight_bytes: int  # planned, from the parameter table
    held_bytes: int  # of the model's tensors, as they came out of `prepare`
    cache_bytes: int  # what is left for pages and slots

    @property
    def page_bytes(self) -> int:
        return memory.page_bytes(self.facts, self.coord, self.resolved)

    @property
    def slot_bytes(self) -> int:
        return memory.slot_bytes(self.facts, self.coord, self.resolved)

    def runner(self, *, num_pages: int, num_slots: int) -> StageRunner:
        """Allocate the caches and put the parts together."""
        cache = allocate_stage_cache(
            memory.layout_of(self.facts, self.coord, self.resolved),
            num_pages=num_pages,
            num_slots=num_slots,
            kv_dtype=KV_DTYPES[self.resolved.kv_cache_dtype],
            conv_dtype=self.dtype,
            device=self.device,
        )
        planned = num_pages * self.page_bytes + (num_slots + 1) * self.slot_bytes
        allocated = self._allocated_bytes(cache)
        log.info("%s", memory.planned_and_allocated(self.coord.rank, self.weight_bytes, planned, allocated))
        return StageRunner(
            model=self.model,
            coord=self.coord,
            cache=cache,
            table=RequestTable(self.resolved.page_size),
            sampler=self._sampler() if self.coord.last_stage else None,
            device=self.device,
            row_multiple=memory.row_multiple(self.resolved),
        )

    def _allocated_bytes(self, cache: StageCache) -> int:
        """Ask torch what it has taken of the GPU; on a CPU, count the tensors."""
        if self.device.type == "cuda":
            return torch.cuda.memory_allocated(self.device)
        return self.held_bytes + cache_bytes(cache)

    def _sampler(self) -> Sampler:
        rows, ranks = self.facts.vocab_size, self.comm.size
        assert rows % ranks == 0, "the parameter table refuses vocabularies that do not split evenly"
        return Sampler(
            self.comm,
            vocab_start=self.comm.rank * (rows // ranks),
            vocab_local=rows // ranks,
            vocab_used=self.resolved.vocab_used,
            device=self.device,
        )


def load_stage_model(
    resolved: Resolved, coord: Coord, comm: Comm, *, moved: Callable[[], None] = lambda: None
) -> LoadedStage:
    """Build this rank's part of the model and fill it, after checking that it fits. `moved` is told of progress.

    Errors: UserError, one line, before any big read.
    """
    device = device_of(resolved, coord)
    dtype = MODEL_DTYPES[resolved.dtype]
    allowed = _allowed_bytes(resolved, device)
    facts = parse_config(*read_config(resolved.model))
    reader = CheckpointReader(resolved.model) if resolved.load_format == "auto" else None
    formats = ConfigFormats(facts) if reader is None else stage_catalogue(reader, facts, coord, mtp=False)
    params = stage_params(facts, coord, formats=formats, mtp=False)
    weights = memory.weight_bytes(params, coord, resolved)
    step = memory.step_bytes(params, facts, coord, resolved)
    caches = memory.bytes_for_caches(coord.rank, allowed, weights, step)
    ops = bind_ops(resolved.op, "cpu" if device.type == "cpu" else gpus_seen_by_torch().arch)
    if coord.rank == 0:
        for line in binding_lines(ops.report):
            log.info("%s", line)
    model = build_model(facts, coord, params, comm, ops, device=device, dtype=dtype, mtp=False)
    _fill(reader, facts, coord, params, dict(model.named_parameters()), resolved.seed, moved)
    model.prepare()
    log.info(
        "rank %d: weights %s, one step up to %s, %s left for caches",
        *(coord.rank, memory.human(weights), memory.human(step), memory.human(caches)),
    )
    held = sum(tensor.nbytes for tensor in model.state_dict().values())
    return LoadedStage(resolved, coord, facts, model, comm, device, dtype, weights, held, caches)


def device_of(resolved: Resolved, coord: Coord) -> torch.device:
    """Say which device a rank computes on: the ranks of one host take its GPUs in order."""
    if resolved.device == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", resolved.first_device + coord.rank - resolved.local_ranks.start)
    torch.cuda.set_device(device)
    return device


def _allowed_bytes(resolved: Resolved, device: torch.device) -> int:
    """Bytes that this worker may use in all, seen before it has taken any."""
    if device.type == "cpu":
        return memory.cpu_memory(free_ram_bytes(), resolved)
    free, total = free_device_bytes(device.index)
    return memory.gpu_memory(total, free, resolved)


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
