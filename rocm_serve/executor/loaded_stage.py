"""One rank with its weights in place, and from there to a runner: caches, steps of fixed sizes, their capture."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from rocm_serve.cache.allocate import allocate_stage_cache, cache_bytes, kv_dtype_of
from rocm_serve.config.ahead import in_effect
from rocm_serve.config.graphs import AUTO_MOST, batch_sizes, prompt_sizes, shared_beside, verified_sizes
from rocm_serve.config.schema import Resolved
from rocm_serve.executor import budget, graphs, stage_memory, step_rows
from rocm_serve.executor.binding import fallbacks
from rocm_serve.executor.decode import DecodeSteps
from rocm_serve.executor.device import dialect_of
from rocm_serve.executor.draft_steps import DraftSteps
from rocm_serve.executor.experts import StageExperts
from rocm_serve.executor.inputs import RequestTable
from rocm_serve.executor.launched import Fetch
from rocm_serve.executor.prompt_steps import PromptSteps
from rocm_serve.executor.runner import StageModel, StageRunner
from rocm_serve.executor.sampler import Sampler
from rocm_serve.executor.speculative import DraftHead
from rocm_serve.executor.upload import Upload
from rocm_serve.messages import WorkerReady
from rocm_serve.models.qwen3_5.spec import ModelFacts
from rocm_serve.ops.batch import StageCache
from rocm_serve.ops.bind import BoundOps
from rocm_serve.parallel.comm import Comm
from rocm_serve.parallel.mesh import Coord
from rocm_serve.platform.probe import free_device_bytes

log = logging.getLogger(__name__)


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
        return stage_memory.page_bytes(self.facts, self.coord, self.resolved)

    @property
    def slot_bytes(self) -> int:
        return stage_memory.slot_bytes(self.facts, self.coord, self.resolved)

    @property
    def graph_refusal(self) -> str | None:
        """Say why no step can be captured, whatever was asked for."""
        if self.device.type == "cpu":
            return "a CPU has no device graphs"
        return graphs.refusal(self.ops.report, self.comm, self.experts.wiring.exchanges.values())

    @property
    def plans_ahead(self) -> bool:
        """Whether steps may be planned before the tokens of those before them are known: until `after_capture` says."""
        return self.resolved.plan_ahead != "off"

    def runner(self, *, num_pages: int, num_slots: int) -> StageRunner:
        """Allocate the caches and put the parts together."""
        cache = allocate_stage_cache(
            stage_memory.layout_of(self.facts, self.coord, self.resolved),
            num_pages=num_pages,
            num_slots=num_slots,
            kv_dtype=kv_dtype_of(self.resolved.kv_cache_dtype, dialect_of(self.device)),
            conv_dtype=self.dtype,
            device=self.device,
        )
        planned = num_pages * self.page_bytes + (num_slots + 1) * self.slot_bytes
        allocated = self._allocated_bytes(cache)
        log.info("%s", budget.planned_and_allocated(self.coord.rank, self.weight_bytes, planned, allocated))
        table, multiple = RequestTable(self.resolved.page_size), step_rows.row_multiple(self.resolved)
        upload = Upload(self.device)
        sampler = self._sampler(upload) if self.coord.last_stage else None
        drafter, decode = None, None
        if self.graph_refusal is None:
            recorder = graphs.DeviceGraphs(self.resolved.max_model_len, beside=shared_beside(self.resolved.device))
            steps = self.draft_steps if self.resolved.draft_tokens else self.decode_steps
            decode = steps(cache, table, sampler, num_slots, recorder)
        if sampler is not None and self.model.mtp is not None:
            drafter = DraftHead(self.model.mtp, sampler, table, cache, self.device, multiple)
        parts = (self.model, self.coord, cache, table, sampler, self.device, multiple)
        newest_S = None
        if self.plans_ahead and self.coord.first_stage:
            newest_S = torch.zeros(num_slots + 1, dtype=torch.int64, device=self.device)
        prompts = None
        if self.graph_refusal is None:
            prompts = self.prompt_steps(cache, num_slots, recorder)
        return StageRunner(*parts, drafter, decode, upload, newest_S, Fetch(self.device), prompts, self.plans_ahead)

    def prompt_steps(self, cache: StageCache, num_slots: int, recorder: graphs.Recorder) -> PromptSteps | None:
        """Make the steps with rows of prompts, None where there are none. Sizes are the same without graphs."""
        resolved = self.resolved
        rows = prompt_sizes(step_rows.prompt_rows(resolved))
        if not rows or graphs.prompt_refusal(self.ops.report) is not None:
            return None
        return PromptSteps(
            self.model,
            cache,
            decodes=tuple(sorted({min(count, num_slots) for count in step_rows.prompt_counts(resolved)})),
            rows=rows,
            prompts=min(step_rows.prompt_sequences(resolved), num_slots),
            captured=resolved.graph_max_batch > 0,
            recorder=recorder,
            max_model_len=resolved.max_model_len,
            hidden_size=None if self.coord.first_stage else self.facts.hidden_size,
            dtype=self.dtype,
            device=self.device,
            row_multiple=step_rows.row_multiple(resolved),
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
            row_multiple=step_rows.row_multiple(resolved),
            slots_ahead=num_slots if self.plans_ahead and self.coord.first_stage else 0,
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
            row_multiple=step_rows.row_multiple(resolved),
        )

    def capture(self, runner: StageRunner, moved: Callable[[], None]) -> WorkerReady:
        """Capture the decode steps of `runner` and say what it took, or why there are none. `moved`: of progress.

        Errors: UserError where the device refuses.
        """
        rank, asked = self.coord.rank, self.resolved.graph_max_batch
        by_reference = fallbacks(self.ops.report, graphs=asked > 0)
        if runner.decode is None or not asked:
            for steps in (runner.decode, runner.prompts):
                if steps is not None:
                    steps.capture(lambda size: moved())  # runs them: nothing else compiles their kernels
            wished = self.resolved.reasons.get("graph_max_batch", "--graph-max-batch 0")
            why = self.graph_refusal or ("this program runs steps one by one" if asked else wished)
            return WorkerReady(rank, 0, why, by_reference)
        started, before = time.monotonic(), self._free_bytes()

        def progress(size: int) -> None:
            moved()
            log.info("rank %d: decode steps of %d requests captured, %.1f s", rank, size, time.monotonic() - started)

        most = runner.decode.capture(progress)
        prompts = 0 if runner.prompts is None else runner.prompts.capture(lambda rows: moved())
        taken, planned = budget.human(before - self._free_bytes()), budget.human(self.graph_bytes)
        said = f"captured in {time.monotonic() - started:.1f} s, {taken} (planned {planned})"
        if isinstance(runner.decode, DraftSteps):
            said += f"; with drafts up to {runner.decode.most_verified}"
        if prompts:
            said += f"; with prompts of up to {prompts} rows"
        log.info("rank %d: device graphs of decode steps up to %d requests: %s", rank, most, said)
        return WorkerReady(rank, most, said, by_reference)

    def after_capture(self, runner: StageRunner, ready: WorkerReady) -> StageRunner:
        """Return `runner` as it serves: ahead where steps are, now that captures are known. Every rank calls it.

        `graphs` asks for those of all ranks, as the core does; it is for one stage, whose ranks `comm` joins.
        """
        least = ready.graph_max_batch
        if self.resolved.plan_ahead == "graphs":
            assert self.resolved.pp == 1
            least = int(self.comm.all_gather(torch.tensor([least], device=self.device)).min())
        return replace(runner, ahead=runner.ahead and in_effect(self.resolved.plan_ahead, least))

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
