"""What a launch plan comes to. Pure values, no torch. Units: bytes."""

from __future__ import annotations

from dataclasses import dataclass

from rocm_serve.config.schema import Resolved
from rocm_serve.diagnostics.plan import RankPlan
from rocm_serve.diagnostics.split import Pieces, Split
from rocm_serve.messages import EffectiveLimits
from rocm_serve.models.qwen3_5.spec import ModelFacts
from rocm_serve.parallel.mesh import Mesh
from rocm_serve.platform.gpus import Gpu


@dataclass(frozen=True, slots=True)
class RankMemory:
    """One rank's GPU. `allowed` is the server's budget (--mem-fraction); estimates lie outside of it."""

    weights: RankPlan
    allowed: int
    preparing: int  # beside the weights for a moment, while providers lay them out: before there are caches
    step: int
    exchange: int  # of `step`: rows on their way to experts
    heap: int  # MORI's, reserved before `allowed` is measured
    sums: int  # AITER's buffers for sums over ranks, likewise
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
class Experts:
    """How they lie: slots of a rank (the most of any layer), slices of each, and what a whole shared expert adds."""

    slots: int
    slices: int
    shared_extra: int  # bytes a rank, on the stage that has most of it; 0 where the shared expert is cut


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
    experts: Experts | None  # None: a dense model
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
        return mesh_of(self.resolved)


def mesh_of(resolved: Resolved) -> Mesh:
    return Mesh(resolved.tp, resolved.pp, resolved.ep)
