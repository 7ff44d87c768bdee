"""The files in which ranks leave how often each expert was chosen (`--expert-counts`), and their sum."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec

from rocm_serve.errors import UserError
from rocm_serve.outputs import check_file
from rocm_serve.parallel.expert_map import DRAFT_LAYER
from rocm_serve.parallel.expert_placement import MoeShape, read_versioned

FORMAT: Final = "rocm-serve expert counts"
Natural = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]


class LayerCount(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One layer: rows that were routed, and how often each expert was chosen, which adds up to top-k times that."""

    tokens: Natural
    chosen: tuple[Natural, ...]


class CountFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one rank counted. Layers are those of its stage; -1 is the draft layer.

    `counting`: the ranks of its stage that leave such a file, itself among them. Ranks that all route the same rows
    leave one file between them.
    """

    format: Literal["rocm-serve expert counts"]
    version: Literal[1]
    served: str  # name of the model in the API
    model: MoeShape
    tp: Positive
    pp: Positive
    rank: Natural
    stage: Natural
    counting: tuple[Natural, ...]
    layers: dict[int, LayerCount]

    def write(self, path: Path) -> None:
        """Replace the file at once: whoever reads finds the old one or this. Errors: OSError."""
        whole = path.with_name(path.name + ".new")
        whole.write_bytes(msgspec.json.encode(self))
        whole.replace(path)


@dataclass(frozen=True, slots=True)
class Counts:
    """The sum over files. `files` are those that were read."""

    model: MoeShape
    tp: int
    pp: int
    layers: Mapping[int, LayerCount]
    files: tuple[Path, ...]

    @property
    def tokens(self) -> int:
        """Rows of the layer that saw most."""
        return max(layer.tokens for layer in self.layers.values())


def file_of_rank(path: str | Path, rank: int) -> Path:
    """Name the file of one rank: `counts.json` is `counts.rank-3.json`."""
    path = Path(path)
    return path.with_name(f"{path.stem}.rank-{rank}{path.suffix}")


def check_free(path: str | Path) -> None:
    """Refuse a name that cannot be written to, or that files of an earlier run have. Errors: UserError."""
    path = Path(path)
    check_file("--expert-counts", path)
    there = _of_ranks(path)
    if there:
        raise UserError(
            f"--expert-counts {path}: {there[0].name} is there already, of an earlier run;"
            " legal: another name, or this one once those files are moved away"
        )


def read_counts(given: Sequence[Path]) -> Counts:
    """Read and add up. A name that was given to `serve --expert-counts` stands for the files of its ranks.

    Errors: UserError for anything that is not a complete set of files of one model.
    """
    paths = [path for one in given for path in _files(one)]
    again = [path for path, times in Counter(path.resolve() for path in paths).items() if times > 1]
    if again:
        raise UserError(f"{again[0]} was given twice; it would count twice")
    read = {path: _read(path) for path in paths}
    first_path, first = next(iter(read.items()))
    for path, one in read.items():
        if one.model != first.model:
            raise UserError(f"{path} is of {one.model}, {first_path} of {first.model}; legal: files of one model")
        if (one.tp, one.pp) != (first.tp, first.pp):
            raise UserError(
                f"{path} was counted at --tp {one.tp} --pp {one.pp}, {first_path} at --tp {first.tp} --pp {first.pp};"
                " legal: files of one layout"
            )
    _check_complete(read)
    layers: dict[int, LayerCount] = {}
    for one in read.values():
        for layer, count in one.layers.items():
            layers[layer] = _sum(layers[layer], count) if layer in layers else count
    if not any(layer.tokens for layer in layers.values()):
        raise UserError(f"no token was counted in {', '.join(map(str, paths))}: ask the server something first")
    return Counts(first.model, first.tp, first.pp, dict(sorted(layers.items())), tuple(paths))


def _files(given: Path) -> list[Path]:
    if given.is_file():
        return [given]
    paths = _of_ranks(given)
    if not paths:
        raise UserError(f"{given}: no such file, and none of a rank beside it ({file_of_rank(given, 0).name})")
    return paths


def _of_ranks(given: Path) -> list[Path]:
    """List the files of ranks that go by the name `given`, by rank."""
    first = f"{given.stem}.rank-"
    numbered = {
        int(number): path
        for path in given.parent.glob("*")
        if path.name.startswith(first)
        and path.name.endswith(given.suffix)
        and (number := path.name.removeprefix(first).removesuffix(given.suffix)).isdecimal()
    }
    return [numbered[number] for number in sorted(numbered)]


def _read(path: Path) -> CountFile:
    file = read_versioned(path, CountFile, FORMAT, str(path))
    if file.rank not in file.counting or not file.stage < file.pp:
        raise UserError(f"{path} contradicts itself: rank {file.rank} of stage {file.stage} would not have left it")
    for layer, count in file.layers.items():
        if not (0 <= layer < file.model.num_layers or layer == DRAFT_LAYER):
            raise UserError(f"{path} contradicts itself: it counts layer {layer} of {file.model.num_layers}")
        if len(count.chosen) != file.model.num_experts:
            raise UserError(
                f"{path} contradicts itself: layer {layer} counts {len(count.chosen)} experts"
                f" of {file.model.num_experts}"
            )
        if sum(count.chosen) != count.tokens * file.model.top_k:
            raise UserError(
                f"{path} contradicts itself: in layer {layer} {count.tokens} tokens chose {sum(count.chosen)} times,"
                f" not {file.model.top_k} times each"
            )
    return file


def _check_complete(read: Mapping[Path, CountFile]) -> None:
    """Every stage, and of each stage every rank that counts, left equally many files (one a run)."""
    stages: dict[int, set[int]] = {}
    for file in read.values():
        stages.setdefault(file.stage, set()).update(file.counting)
    pp = next(iter(read.values())).pp
    absent = sorted(set(range(pp)) - stages.keys())
    if absent:
        raise UserError(f"no file of stage {absent[0]} was given, of {pp} stages: its layers are not counted in others")
    runs: dict[tuple[int, ...], Counter[int]] = {}  # another exchange leaves other ranks' files
    for file in read.values():
        runs.setdefault(file.counting, Counter()).update([file.rank])
    for counting, left in runs.items():
        most = max(left.values())
        for rank in counting:
            if left[rank] < most:
                given = f"only {left[rank]} of {most} files" if left[rank] else "no file"
                raise UserError(f"rank {rank} counted too, and {given} of it was given; see the host that it ran on")


def _sum(one: LayerCount, other: LayerCount) -> LayerCount:
    chosen = tuple(a + b for a, b in zip(one.chosen, other.chosen, strict=True))
    return LayerCount(tokens=one.tokens + other.tokens, chosen=chosen)
