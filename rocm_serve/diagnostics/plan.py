"""What every rank would hold, and what a checkpoint comes to: from the configuration alone, or from headers. No torch.

Units: bytes, unless a name says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from rocm_serve.checkpoint.ledger import check_stage, stage_catalogue
from rocm_serve.checkpoint.reader import ITEMSIZES, CheckpointReader, read_config
from rocm_serve.errors import UserError
from rocm_serve.models.qwen3_5.spec import (
    ConfigFormats,
    Formats,
    ModelFacts,
    parse_config,
    stage_layers,
    stage_params,
)
from rocm_serve.parallel.layout import Param, Place, copies, legal_degrees, local_bytes
from rocm_serve.parallel.mesh import Coord, Mesh

GROUPS = ("embedding", "layers", "head", "mtp")


@dataclass(frozen=True, slots=True)
class CheckpointTotals:
    """A whole checkpoint: stored tensors, parameters (scales are not), bytes of tensor data."""

    tensors: int
    parameters: int
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class RankPlan:
    """What one rank holds. `disk_bytes` is what it keeps of the files; None when there are no headers to say."""

    rank: int
    stage: int
    tp_rank: int
    layers: range
    weight_bytes: Mapping[str, int]  # by group
    disk_bytes: int | None

    @property
    def total_bytes(self) -> int:
        return sum(self.weight_bytes.values())


@dataclass(frozen=True, slots=True)
class Plan:
    """A launch as it would be: the mesh, the legal tensor-parallel degrees, the ranks that were asked for."""

    facts: ModelFacts
    mesh: Mesh
    legal_tp: tuple[int, ...]
    from_headers: bool
    ranks: tuple[RankPlan, ...]

    def lines(self) -> tuple[str, ...]:
        """Say it for people."""
        source = "checkpoint headers" if self.from_headers else "the configuration alone"
        legal = ", ".join(map(str, self.legal_tp))
        head = f"tp {self.mesh.tp} x pp {self.mesh.pp} by {source}; legal tp: {legal}"
        return (head, *(_line(rank) for rank in self.ranks))


def plan(
    model: str | Path, tp: int, pp: int, rank: int | None = None, *, mtp: bool | None = None, model_itemsize: int = 2
) -> Plan:
    """Plan the launch of `model`: a checkpoint directory, a directory with a config.json only, or such a file.

    `rank` None plans every rank, by headers only the shards of the stages asked for are looked at. `mtp` None: as
    the model has it. `model_itemsize` is that of the dtype the model runs in.
    Errors: UserError for an illegal degree or rank, a broken configuration, a checkpoint that does not match it.
    """
    path = Path(model)
    reader = None
    if path.is_file():
        facts = parse_config(_config_file(path))
    else:
        facts = parse_config(*read_config(path))
        reader = CheckpointReader(path) if any(path.glob("*.safetensors*")) else None
    mesh = _mesh(tp, pp, rank)
    wanted = bool(facts.mtp_layers) if mtp is None else mtp
    ranks = range(mesh.world) if rank is None else (rank,)
    planned: list[RankPlan] = []
    stages: dict[int, tuple[dict[str, Param], Mapping[str, int] | None]] = {}
    for one in ranks:
        coord = mesh.coord(one)
        if coord.stage not in stages:
            stages[coord.stage] = _stage(facts, coord, reader, wanted)
        params, itemsizes = stages[coord.stage]
        planned.append(plan_rank(facts, coord, params, model_itemsize=model_itemsize, stored=itemsizes))
    return Plan(facts, mesh, legal_tp(facts, ConfigFormats(facts)), reader is not None, tuple(planned))


def plan_rank(
    facts: ModelFacts,
    coord: Coord,
    params: Mapping[str, Param],
    *,
    model_itemsize: int,
    stored: Mapping[str, int] | None = None,
) -> RankPlan:
    """Add up the share of one rank.

    `stored` gives the item size of each checkpoint key in the files, if that is known.
    """
    groups = dict.fromkeys(GROUPS, 0)
    tp, tp_rank = coord.mesh.tp, coord.tp_rank
    for name, param in params.items():
        groups[_group(name)] += local_bytes(param, tp, tp_rank, model_itemsize=model_itemsize)
    disk = None
    if stored is not None:
        place = Place(tp, tp_rank)
        every = (copy for param in params.values() for copy in copies(param, place))
        disk = sum(copy.elements * stored[copy.key] for copy in every)
    return RankPlan(coord.rank, coord.stage, tp_rank, stage_layers(facts, coord), groups, disk)


def checkpoint_totals(
    facts: ModelFacts, formats: Formats | None = None, *, mtp: bool | None = None
) -> CheckpointTotals:
    """Count a whole checkpoint as the published repositories store it: FP8 weights in 1 byte, all else in BF16."""
    wanted = bool(facts.mtp_layers) if mtp is None else mtp
    params = stage_params(facts, Mesh(1, 1).coord(0), formats=formats or ConfigFormats(facts), mtp=wanted)
    itemsizes = {"fp8": 1, "model": 2, "float32": 2}
    stored = {
        part.key: (prod(part.source), itemsizes[param.dtype]) for param in params.values() for part in param.parts
    }
    weights = (size for key, (size, _) in stored.items() if not key.endswith("_scale_inv"))
    return CheckpointTotals(len(stored), sum(weights), sum(size * width for size, width in stored.values()))


def legal_tp(facts: ModelFacts, formats: Formats) -> tuple[int, ...]:
    """List the tensor-parallel degrees at which no head, expert column or scale block is cut.

    One layer of each kind speaks for all.
    """
    some = max(facts.layer_types.index(kind) for kind in set(facts.layer_types)) + 1
    short = replace(facts, num_layers=some, layer_types=facts.layer_types[:some])
    params = stage_params(short, Mesh(1, 1).coord(0), formats=formats, mtp=False)
    return legal_degrees(split for param in params.values() for split in param.splits)


def _stage(
    facts: ModelFacts, coord: Coord, reader: CheckpointReader | None, mtp: bool
) -> tuple[dict[str, Param], Mapping[str, int] | None]:
    if reader is None:
        return stage_params(facts, coord, formats=ConfigFormats(facts), mtp=mtp), None
    found = stage_catalogue(reader, facts, coord, mtp=mtp)
    params = stage_params(facts, coord, formats=found, mtp=mtp)
    infos = check_stage(reader, facts, params, found)
    return params, {key: ITEMSIZES[info.dtype] for key, info in infos.items()}


def _mesh(tp: int, pp: int, rank: int | None) -> Mesh:
    if tp < 1 or pp < 1:
        raise UserError(f"tp {tp} and pp {pp}; legal: whole numbers, at least 1")
    if rank is not None and not 0 <= rank < tp * pp:
        raise UserError(f"rank {rank} is not one of the {tp * pp} of tp {tp} x pp {pp}; legal: 0..{tp * pp - 1}")
    return Mesh(tp, pp)


def _config_file(path: Path) -> dict[str, object]:
    if path.name != "config.json":
        raise UserError(f"{path} is not a config.json or a directory with one")
    return read_config(path.parent)[0]


def _group(name: str) -> str:
    if name.startswith("mtp."):
        return "mtp"
    if ".layers." in name:
        return "layers"
    return "embedding" if "embed_tokens" in name else "head"


def _line(rank: RankPlan) -> str:
    groups = ", ".join(f"{name} {_human(size)}" for name, size in rank.weight_bytes.items() if size)
    disk = "" if rank.disk_bytes is None else f"; keeps {_human(rank.disk_bytes)} of the files"
    return (
        f"rank {rank.rank} (stage {rank.stage}, layers {rank.layers.start}..{rank.layers.stop - 1}):"
        f" {_human(rank.total_bytes)} of weights ({groups}){disk}"
    )


def _human(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.2f} MB"
