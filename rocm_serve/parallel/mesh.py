"""Which rank sits where: world = pipeline stages x tensor-parallel ranks, `ep` dividing the latter. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from rocm_serve.parallel.layout import Place


@dataclass(frozen=True, slots=True)
class Mesh:
    """Ranks are numbered stage by stage: rank = stage * tp + tp_rank, so that a stage is a whole node by default."""

    tp: int
    pp: int
    ep: int = 1

    @property
    def world(self) -> int:
        return self.tp * self.pp

    def coord(self, rank: int) -> Coord:
        if not 0 <= rank < self.world:
            raise ValueError(f"rank {rank} is not in 0..{self.world - 1} (tp {self.tp} x pp {self.pp})")
        return Coord(rank=rank, tp_rank=rank % self.tp, stage=rank // self.tp, mesh=self)

    def stages_of(self, node: int, nnodes: int) -> range:
        """Return the stages of one of `nnodes` nodes: as many on each, none of them on two."""
        assert self.pp % nnodes == 0, "refused where the flags are read"
        return range(node * self.pp // nnodes, (node + 1) * self.pp // nnodes)

    def tp_group(self, stage: int) -> tuple[int, ...]:
        return tuple(range(stage * self.tp, (stage + 1) * self.tp))


@dataclass(frozen=True, slots=True)
class Coord:
    rank: int
    tp_rank: int
    stage: int
    mesh: Mesh

    @property
    def place(self) -> Place:
        """Where this rank stands on the axes that cut weights."""
        return Place(self.mesh.tp, self.tp_rank, self.mesh.ep)

    @property
    def first_stage(self) -> bool:
        return self.stage == 0

    @property
    def last_stage(self) -> bool:
        return self.stage == self.mesh.pp - 1


def split_layers(num_layers: int, pp: int) -> tuple[range, ...]:
    """Cut layers into `pp` consecutive stages of equal size; the first stages take the remainder."""
    if not 1 <= pp <= num_layers:
        raise ValueError(f"{num_layers} layers cannot be cut into {pp} stages; legal: 1..{num_layers}")
    base, more = divmod(num_layers, pp)
    stages = []
    start = 0
    for stage in range(pp):
        end = start + base + (stage < more)
        stages.append(range(start, end))
        start = end
    return tuple(stages)
