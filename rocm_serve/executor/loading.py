"""From a checkpoint directory to one rank's model, and from the model to a runner."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from rocm_serve.cache.allocate import allocate_stage_cache, cache_bytes, kv_dtype_of
from rocm_serve.checkpoint.ledger import stage_catalogue
from rocm_serve.checkpoint.load import Progress, dummy_fill, load_stage
from rocm_serve.checkpoint.reader import CheckpointReader, read_config
from rocm_serve.config.experts import expert_plan
from rocm_serve.config.graphs import AUTO_MOST, batch_sizes, prompt_sizes, verified_sizes
from rocm_serve.config.load import environment
from rocm_serve.config.schema import Resolved
from rocm_serve.executor import graphs, memory
from rocm_serve.executor.binding import Wishes, check_same, op_facts, settle
from rocm_serve.executor.decode import DecodeSteps
from rocm_serve.executor.draft_steps import DraftSteps
from rocm_serve.executor.experts import StageExperts, build_exchanges
from rocm_serve.executor.inputs import RequestTable
from rocm_serve.executor.launched import Fetch
from rocm_serve.executor.probe_node import NodeProber, cache_folder, machine_key
from rocm_serve.executor.prompt_steps import PromptSteps
from rocm_serve.executor.runner import StageModel, StageRunner
from rocm_serve.executor.sampler import Sampler
from rocm_serve.executor.speculative import DraftHead
from rocm_serve.executor.upload import Upload
from rocm_serve.messages import WorkerReady
from rocm_serve.models.qwen3_5.spec import ConfigFormats, ModelFacts, parse_config, stage_params
from rocm_serve.models.registry import build_model
from rocm_serve.ops.batch import StageCache
from rocm_serve.ops.bind import BoundOps, bind_ops, binding_lines
from rocm_serve.ops.comm.choice import summing
from rocm_serve.ops.fp8 import FN, FP8_DTYPES
from rocm_serve.ops.probe_child import PRODUCT_TABLE, ops_of
from rocm_serve.parallel.board import Board, NotesOfOneProcess
from rocm_serve.parallel.comm import Comm
from rocm_serve.parallel.layout import Param
from rocm_serve.parallel.mesh import Coord
from rocm_serve.platform.facts import Fp8Dialect, fp8_dialect
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
    ops: BoundOps
    comm: Comm
    device: torch.device
    dtype: torch.dtype
    weight_bytes: int  # planned, from the parameter table
    held_bytes: int  # of the model's tensors, as they came out of `prepare`
    cache_bytes: int  # what is left for pages and slots
    experts: StageExperts
    graph_bytes: int  # planned, for graphs of decode steps

    @property
    def page_bytes(self) -> int:
        return memory.page_bytes(self.facts, self.coord, self.resolved)

    @property
    def slot_bytes(self) -> int:
        return memory.slot_bytes(self.facts, self.coord, self.resolved)

    @property
    def graph_refusal(self) -> str | None:
        """Say why no step can be captured, whatever was asked for."""
        if self.device.type == "cpu":
            return "a CPU has no device graphs"
        return graphs.refusal(self.ops.report, self.comm, self.experts.wiring.exchanges.values())

    @property
    def plans_ahead(self) -> bool:
        """Whether steps may be planned before the tokens of those before them are known."""
        return self.resolved.plan_ahead != "off"

    def runner(self, *, num_pages: int, num_slots: int) -> StageRunner:
        """Allocate the caches and put the parts together."""
        cache = allocate_stage_cache(
            memory.layout_of(self.facts, self.coord, self.resolved),
            num_pages=num_pages,
            num_slots=num_slots,
            kv_dtype=kv_dtype_of(self.resolved.kv_cache_dtype, dialect_of(self.device)),
            conv_dtype=self.dtype,
            device=self.device,
        )
        planned = num_pages * self.page_bytes + (num_slots + 1) * self.slot_bytes
        allocated = self._allocated_bytes(cache)
        log.info("%s", memory.planned_and_allocated(self.coord.rank, self.weight_bytes, planned, allocated))
        table, multiple = RequestTable(self.resolved.page_size), memory.row_multiple(self.resolved)
        upload = Upload(self.device)
        sampler = self._sampler(upload) if self.coord.last_stage else None
        drafter, decode = None, None
        if self.graph_refusal is None:
            recorder = graphs.DeviceGraphs(self.resolved.max_model_len)
            steps = self.draft_steps if self.resolved.draft_tokens else self.decode_steps
            decode = steps(cache, table, sampler, num_slots, recorder)
        if sampler is not None and self.model.mtp is not None:
            drafter = DraftHead(self.model.mtp, sampler, table, cache, self.device, multiple)
        parts = (self.model, self.coord, cache, table, sampler, self.device, multiple)
        newest_S = torch.zeros(num_slots + 1, dtype=torch.int64, device=self.device) if self.plans_ahead else None
        prompts = None
        if self.graph_refusal is None:
            prompts = self.prompt_steps(cache, num_slots, recorder)
        return StageRunner(*parts, drafter, decode, upload, newest_S, Fetch(self.device), prompts)

    def prompt_steps(self, cache: StageCache, num_slots: int, recorder: graphs.Recorder) -> PromptSteps | None:
        """Make the steps with rows of one prompt, None where there are none. Sizes are the same without graphs."""
        resolved = self.resolved
        rows = prompt_sizes(memory.prompt_rows(resolved))
        if not rows or graphs.prompt_refusal(self.ops.providers) is not None:
            return None
        return PromptSteps(
            self.model,
            cache,
            decodes=tuple(sorted({min(count, num_slots) for count in memory.prompt_counts(resolved)})),
            rows=rows,
            captured=resolved.graph_max_batch > 0,
            recorder=recorder,
            max_model_len=resolved.max_model_len,
            hidden_size=None if self.coord.first_stage else self.facts.hidden_size,
            dtype=self.dtype,
            device=self.device,
            row_multiple=memory.row_multiple(resolved),
        )

    def decode_steps(
        self, cache: StageCache, table: RequestTable, sampler: Sampler | None, num_slots: int, recorder: graphs.Recorder
    ) -> DecodeSteps:
        """Make the steps of fixed sizes. Sizes are the same with graphs and without, so that tokens are."""
        resolved = self.resolved
        sizes = batch_sizes(min(resolved.graph_max_batch or AUTO_MOST, num_slots))
        return DecodeSteps(
            self.model,
            cache,
            table,
            sampler,
            sizes=sizes,
            captured=sizes if resolved.graph_max_batch else (),
            recorder=recorder,
            max_pages=-(-resolved.max_model_len // resolved.page_size),
            hidden_size=None if self.coord.first_stage else self.facts.hidden_size,
            dtype=self.dtype,
            device=self.device,
            row_multiple=memory.row_multiple(resolved),
            slots_ahead=num_slots if self.plans_ahead else 0,
        )

    def draft_steps(
        self, cache: StageCache, table: RequestTable, sampler: Sampler | None, num_slots: int, recorder: graphs.Recorder
    ) -> DraftSteps:
        """Make the steps of fixed sizes of a server that drafts."""
        resolved = self.resolved
        most = min(resolved.graph_max_batch or AUTO_MOST, num_slots)
        return DraftSteps(
            self.model,
            self.model.mtp,
            cache,
            table,
            sampler,
            sizes=batch_sizes(most),
            verified_sizes=verified_sizes(most, resolved.draft_tokens),
            captured=resolved.graph_max_batch > 0,
            recorder=recorder,
            max_pages=-(-resolved.max_model_len // resolved.page_size),
            hidden_size=None if self.coord.first_stage else self.facts.hidden_size,
            vocab_size=self.facts.vocab_size,
            dtype=self.dtype,
            device=self.device,
            row_multiple=memory.row_multiple(resolved),
        )

    def capture(self, runner: StageRunner, moved: Callable[[], None]) -> WorkerReady:
        """Capture the decode steps of `runner` and say what it took, or why there are none. `moved`: of progress.

        Errors: UserError where the device refuses.
        """
        rank, asked = self.coord.rank, self.resolved.graph_max_batch
        if runner.decode is None or not asked:
            wished = self.resolved.reasons.get("graph_max_batch", "--graph-max-batch 0")
            why = self.graph_refusal or ("this program runs steps one by one" if asked else wished)
            return WorkerReady(rank, 0, why)
        started, before = time.monotonic(), self._free_bytes()

        def progress(size: int) -> None:
            moved()
            log.info("rank %d: decode steps of %d requests captured, %.1f s", rank, size, time.monotonic() - started)

        most = runner.decode.capture(progress)
        prompts = 0 if runner.prompts is None else runner.prompts.capture(lambda rows: moved())
        taken, planned = memory.human(before - self._free_bytes()), memory.human(self.graph_bytes)
        said = f"captured in {time.monotonic() - started:.1f} s, {taken} (planned {planned})"
        if isinstance(runner.decode, DraftSteps):
            said += f"; with drafts up to {runner.decode.most_verified}"
        if prompts:
            said += f"; with prompts of up to {prompts} rows"
        log.info("rank %d: device graphs of decode steps up to %d requests: %s", rank, most, said)
        return WorkerReady(rank, most, said)

    def _free_bytes(self) -> int:
        free, _ = (0, 0) if self.device.type == "cpu" else free_device_bytes(self.device.index)
        return free

    def _allocated_bytes(self, cache: StageCache) -> int:
        """Ask torch what it has taken of the GPU; on a CPU, count the tensors."""
        if self.device.type == "cuda":
            return torch.cuda.memory_allocated(self.device)
        return self.held_bytes + cache_bytes(cache)

    def _sampler(self, upload: Upload) -> Sampler:
        rows, ranks = self.facts.vocab_size, self.comm.size
        assert rows % ranks == 0, "the parameter table refuses vocabularies that do not split evenly"
        return Sampler(
            self.comm,
            vocab_start=self.comm.rank * (rows // ranks),
            vocab_local=rows // ranks,
            vocab_used=self.resolved.vocab_used,
            device=self.device,
            draw_token=self.ops.draw_token,
            log_sum_exp=self.ops.log_sum_exp,
            upload=upload,
        )


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
    _, units = _arch_of(device)
    # First of all: what exchanges take of a GPU is no longer free then, and whatever is missing shows at once.
    experts = build_exchanges(facts, plan, coord, resolved, comm, host=host, compute_units=units, dtype=dtype)
    allowed, held = _allowed_and_held(resolved, device)
    reader = CheckpointReader(resolved.model) if resolved.load_format == "auto" else None
    drafts = resolved.draft_tokens > 0
    formats = ConfigFormats(facts) if reader is None else stage_catalogue(reader, facts, coord, mtp=drafts)
    params = stage_params(facts, coord, formats=formats, mtp=drafts, experts=plan)
    weights = memory.weight_bytes(params, coord, resolved)
    step = memory.step_bytes(params, facts, coord, resolved)
    caches = memory.bytes_for_caches(coord.rank, allowed, weights, step, held=held)
    ops = _bind(facts, params, coord, resolved, device, board, table, moved)
    memory.check_preparation(
        coord.rank, allowed, weights, memory.preparation_bytes(params, coord, resolved, ops.preparing)
    )
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
    log.info(
        "rank %d: weights %s, one step up to %s, %s left for caches",
        *(coord.rank, memory.human(weights), memory.human(step), memory.human(caches)),
    )
    held = sum(tensor.nbytes for tensor in model.state_dict().values())
    parts = (resolved, coord, facts, model, ops, comm, device, dtype, weights, held, caches, experts)
    return LoadedStage(*parts, memory.graph_bytes(params, facts, coord, resolved))


def device_of(resolved: Resolved, coord: Coord) -> torch.device:
    """Say which device a rank computes on: the ranks of one host take its GPUs in order."""
    if resolved.device == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", resolved.first_device + coord.rank - resolved.local_ranks.start)
    torch.cuda.set_device(device)
    return device


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
    arch, units = _arch_of(device)
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
    check_same(bound.report, bound.fp8_activation, shared, moved)
    if coord.rank == 0:
        for line in binding_lines(bound.report):
            log.info("%s", line)
    return bound


def _arch_of(device: torch.device) -> tuple[str, int]:
    """Name the architecture that ops are chosen for, and count compute units; a CPU has none."""
    if device.type == "cpu":
        return "cpu", 0
    gpus = gpus_seen_by_torch()
    return gpus.arch, gpus.compute_units


def dialect_of(device: torch.device) -> Fp8Dialect:
    """Say which encoding of e4m3 the device's matrix instructions read."""
    if device.type == "cpu":
        return "fn"
    gpus = gpus_seen_by_torch()
    return fp8_dialect("rocm" if gpus.kind == "rocm" else "cuda", gpus.arch)


def _allowed_and_held(resolved: Resolved, device: torch.device) -> tuple[int, int]:
    """Bytes that this worker may use in all, and those of its GPU in use before it has taken any for the model."""
    if device.type == "cpu":
        return memory.cpu_memory(free_ram_bytes(), resolved), 0
    free, total = free_device_bytes(device.index)
    return memory.gpu_memory(total, free, resolved), total - free


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
