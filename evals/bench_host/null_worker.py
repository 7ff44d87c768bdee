"""A rank of the real worker whose model does nothing. The supervisor starts it in place of the real one.

Plans, request table, input tensors, sampler, results and their transport are the product's. Only the network is not
there: its hidden rows are zeros, and its logits are a piece of a table of random numbers, another one each step.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch

from rocm_serve.checkpoint.reader import read_config
from rocm_serve.config.schema import Resolved
from rocm_serve.executor.experts import StageExperts
from rocm_serve.executor.inputs import RequestTable
from rocm_serve.executor.loaded_stage import LoadedStage
from rocm_serve.executor.runner import StageRunner
from rocm_serve.executor.sampler import Sampler
from rocm_serve.executor.step_rows import padded, row_multiple
from rocm_serve.executor.worker import main
from rocm_serve.layers.moe import ExpertWiring
from rocm_serve.models.qwen3_5.spec import parse_config
from rocm_serve.ops.batch import ForwardBatch, StageCache
from rocm_serve.ops.bind import bind_ops
from rocm_serve.parallel.board import Board
from rocm_serve.parallel.comm import Comm
from rocm_serve.parallel.exchange.make import Exchanges
from rocm_serve.parallel.expert_map import ExpertPlan
from rocm_serve.parallel.mesh import Coord

VOCABULARY = 4096  # columns of the logits: as many as the null model had that other servers were measured with
_SPARE_ROWS = 512
_CACHE_BYTES = 1 << 24


class NullModel:
    """Answers at once. `logits` gives rows that were drawn before; the sampler takes a token of each."""

    mtp = None

    def __init__(self, rows: int, hidden_size: int, columns: int, seed: int) -> None:
        self._hidden_TH = torch.zeros(rows, hidden_size)
        self._logits_RV = torch.randn(rows + _SPARE_ROWS, columns, generator=torch.Generator().manual_seed(seed))
        self._random = random.Random(seed)

    def forward(self, batch: ForwardBatch, hidden_TD: torch.Tensor | None) -> torch.Tensor:
        return self._hidden_TH[: batch.token_ids_T.shape[0]]

    def logits(self, hidden_RD: torch.Tensor) -> torch.Tensor:
        first = self._random.randrange(_SPARE_ROWS)
        return self._logits_RV[first : first + hidden_RD.shape[0]]


@dataclass(frozen=True, slots=True)
class NullStage(LoadedStage):
    """A stage without layers: pages and slots are numbers, and hold nothing."""

    @property
    def page_bytes(self) -> int:
        return 1

    @property
    def slot_bytes(self) -> int:
        return 1

    def runner(self, *, num_pages: int, num_slots: int) -> StageRunner:
        columns = VOCABULARY // self.comm.size
        sampler = Sampler(
            self.comm,
            vocab_start=self.comm.rank * columns,
            vocab_local=columns,
            vocab_used=min(self.resolved.vocab_used, VOCABULARY),
        )
        return StageRunner(
            model=self.model,
            coord=self.coord,
            cache=StageCache(self.resolved.page_size, {}, {}, {}, {}),
            table=RequestTable(self.resolved.page_size),
            sampler=sampler if self.coord.last_stage else None,
            device=self.device,
            row_multiple=row_multiple(self.resolved),
        )


def load_null_stage(
    resolved: Resolved,
    coord: Coord,
    comm: Comm,
    *,
    moved: Callable[[], None] = lambda: None,
    board: Board | None = None,
    host: Comm | None = None,
) -> NullStage:
    """Stand in for `load_stage_model`: only the configuration is read, and no providers are agreed on."""
    facts = parse_config(*read_config(resolved.model))
    rows = padded(resolved.chunked_prefill_size + resolved.max_running_requests, row_multiple(resolved))
    model = NullModel(rows, facts.hidden_size, VOCABULARY // comm.size, resolved.seed)
    return NullStage(
        resolved=resolved,
        coord=coord,
        facts=facts,
        model=model,
        ops=bind_ops({}, "cpu"),
        comm=comm,
        device=torch.device("cpu"),
        dtype=torch.float32,
        weight_bytes=0,
        held_bytes=0,
        cache_bytes=_CACHE_BYTES,
        experts=StageExperts(ExpertWiring(ExpertPlan(), {}), Exchanges((), comm, row_multiple=1)),
        graph_bytes=0,
    )


if __name__ == "__main__":
    main(load_null_stage)
