"""What every rank would hold, and what a checkpoint comes to: from the configuration alone, or from headers. No torch.

Units: bytes, unless a name says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Literal

from rocm_serve.checkpoint.ledger import check_stage
from rocm_serve.checkpoint.reader import INDEX, ITEMSIZES, CheckpointReader, naming, read_config, read_index
from rocm_serve.checkpoint.rules import catalogue
from rocm_serve.errors import UserError
from rocm_serve.models.qwen3_5.spec import (
    ConfigFormats,
    Formats,
    ModelFacts,
    one_of_each,
    parse_config,
    stage_layers,
    stage_params,
)
from rocm_serve.parallel import layout as layouts
from rocm_serve.parallel.expert_map import ExpertPlan
from rocm_serve.parallel.layout import Param, Split, bytes_at, copies
from rocm_serve.parallel.mesh import Coord, Mesh

GROUPS = ("embedding", "layers", "head", "mtp")
_PLAIN = ExpertPlan()


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
class Survey:
    """What a model is known from: its configuration, and its index or its shards where they are.

    `names` maps tensors to files; None when there is neither. `reader` is there when every shard is.
    """

    path: Path  # of the directory
    facts: ModelFacts
    names: Mapping[str, str] | None
    reader: CheckpointReader | None

    @property
    def source(self) -> Literal["the configuration alone", "configuration and index", "checkpoint headers"]:
        if self.reader is not None:
            return "checkpoint headers"
        return "the configuration alone" if self.names is None else "configuration and index"

    @property
    def missing_files(self) -> tuple[str, ...]:
        """Shards that the index names and the directory lacks."""
        files = sorted(set((self.names or {}).values()))
        return tuple(file for file in files if not (self.path / file).is_file())

    def file_bytes(self, files: Sequence[str]) -> int | None:
        """Add up the sizes of `files`; None unless all are there."""
        paths = [self.path / file for file in files]
        return sum(path.stat().st_size for path in paths) if all(path.is_file() for path in paths) else None


@dataclass(frozen=True, slots=True)
class StageTable:
    """One stage: its parameters, the item sizes of its stored tensors (from headers), its files (from the index)."""

    params: Mapping[str, Param]
    stored: Mapping[str, int] | None
    files: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """A launch as it would be: the mesh, the legal tensor-parallel degrees, the ranks that were asked for."""

    facts: ModelFacts
    mesh: Mesh
    legal_tp: tuple[int, ...]
    source: str
    ranks: tuple[RankPlan, ...]

    @property
    def from_headers(self) -> bool:
        return self.source == "checkpoint headers"

    def lines(self) -> tuple[str, ...]:
        """Say it for people."""
        legal, ep = ", ".join(map(str, self.legal_tp)), f" with ep {self.mesh.ep}" if self.mesh.ep > 1 else ""
        head = f"tp {self.mesh.tp} x pp {self.mesh.pp}{ep} by {self.source}; legal tp{ep}: {legal}"
        return (head, *(rank_line(rank) for rank in self.ranks))


def survey(model: str | Path) -> Survey:
    """Look at `model`: a checkpoint directory, a directory with a config.json only, or such a file.

    Errors: UserError for what is neither, a broken configuration or index.
    """
    path = Path(model)
    with naming(path):
        is_file = path.is_file()
    if is_file:
        if path.name != "config.json":
            raise UserError(f"{path} is not a config.json or a directory with one")
        # The file alone was named: what lies beside it may be of another model.
        return Survey(path.parent, parse_config(read_config(path.parent)[0]), None, None)
    facts = parse_config(*read_config(path))
    if (path / INDEX).is_file():
        names = read_index(path / INDEX)
        if not all((path / file).is_file() for file in set(names.values())):
            return Survey(path, facts, names, None)
    elif not any(path.glob("*.safetensors")):
        return Survey(path, facts, None, None)
    reader = CheckpointReader(path)
    return Survey(path, facts, reader.names, reader)


def stage_table(seen: Survey, coord: Coord, *, mtp: bool, experts: ExpertPlan) -> StageTable:
    """Make the table of one stage, checked against the headers where there are any."""
    facts = seen.facts
    if seen.names is None:
        params = stage_params(facts, coord, formats=ConfigFormats(facts), mtp=mtp, experts=experts)
        return StageTable(params, None, ())
    layers = stage_layers(facts, coord)
    tied = facts.tie_word_embeddings
    found = catalogue(seen.names, layers, first=coord.first_stage, last=coord.last_stage, mtp=mtp, tied=tied)
    params = stage_params(facts, coord, formats=found, mtp=mtp, experts=experts)
    files = tuple(sorted({seen.names[name] for name in found.tensors.values()}))
    if seen.reader is None:
        return StageTable(params, None, files)
    infos = check_stage(seen.reader, facts, params, found)
    return StageTable(params, {key: ITEMSIZES[info.dtype] for key, info in infos.items()}, files)


def plan(
    model: str | Path,
    tp: int,
    pp: int,
    rank: int | None = None,
    *,
    mtp: bool | None = None,
    experts: ExpertPlan = _PLAIN,
    model_itemsize: int = 2,
) -> Plan:
    """Plan the weights of a launch of `model` (see `survey`).

    `rank` None plans every rank, by headers only the shards of the stages asked for are looked at. `mtp` None: as
    the model has it. `experts`: how they lie over a stage. `model_itemsize` is that of the dtype the model runs in.
    Errors: UserError for an illegal degree or rank, a broken configuration, a checkpoint that does not match it.
    """
    seen = survey(model)
    facts = seen.facts
    mesh = _mesh(tp, pp, experts.ep, rank)
    wanted = bool(facts.mtp_layers) if mtp is None else mtp
    ranks = range(mesh.world) if rank is None else (rank,)
    planned: list[RankPlan] = []
    stages: dict[int, StageTable] = {}
    for one in ranks:
        coord = mesh.coord(one)
        if coord.stage not in stages:
            stages[coord.stage] = stage_table(seen, coord, mtp=wanted, experts=experts)
        table = stages[coord.stage]
        planned.append(plan_rank(facts, coord, table.params, model_itemsize=model_itemsize, stored=table.stored))
    return Plan(facts, mesh, legal_tp(facts, ep=mesh.ep), seen.source, tuple(planned))


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
    place = coord.place
    for name, param in params.items():
        groups[group_of(name)] += bytes_at(param, place, model_itemsize=model_itemsize)
    disk = None
    if stored is not None:
        every = (copy for param in params.values() for copy in copies(param, place))
        disk = sum(copy.elements * stored[copy.key] for copy in every)
    return RankPlan(coord.rank, coord.stage, coord.tp_rank, stage_layers(facts, coord), groups, disk)


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


def legal_tp(facts: ModelFacts, formats: Formats | None = None, ep: int = 1) -> tuple[int, ...]:
    """List the tensor-parallel degrees at which, with `ep`, no head, expert or scale block is cut."""
    return layouts.legal_tp(_splits(facts, formats), ep)


def legal_ep(facts: ModelFacts, tp: int, formats: Formats | None = None) -> tuple[int, ...]:
    """List the expert-parallel degrees of a stage of `tp` ranks."""
    return layouts.legal_ep(_splits(facts, formats), tp)


def _splits(facts: ModelFacts, formats: Formats | None) -> list[Split]:
    """List every split of a model once or more; one layer of each kind speaks for all."""
    params = stage_params(one_of_each(facts), Mesh(1, 1).coord(0), formats=formats or ConfigFormats(facts), mtp=False)
    return [split for param in params.values() for split in param.splits]


def _mesh(tp: int, pp: int, ep: int, rank: int | None) -> Mesh:
    if tp < 1 or pp < 1 or ep < 1:
        with_ep = f" with ep {ep}" if ep < 1 else ""
        raise UserError(f"tp {tp} and pp {pp}{with_ep}; legal: whole numbers, at least 1")
    if rank is not None and not 0 <= rank < tp * pp:
        raise UserError(f"rank {rank} is not one of the {tp * pp} of tp {tp} x pp {pp}; legal: 0..{tp * pp - 1}")
    return Mesh(tp, pp, ep)


def group_of(name: str) -> str:
    if name.startswith("mtp."):
        return "mtp"
    if ".layers." in name:
        return "layers"
    return "embedding" if "embed_tokens" in name else "head"


def rank_line(rank: RankPlan) -> str:
    groups = ", ".join(f"{name} {human(size)}" for name, size in rank.weight_bytes.items() if size)
    disk = "" if rank.disk_bytes is None else f"; keeps {human(rank.disk_bytes)} of the files"
    return (
        f"rank {rank.rank} (stage {rank.stage}, layers {rank.layers.start}..{rank.layers.stop - 1}):"
        f" {human(rank.total_bytes)} of weights ({groups}){disk}"
    )


def human(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.2f} MB"
